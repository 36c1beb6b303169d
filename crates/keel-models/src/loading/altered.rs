//! Parameters that differ from others in a few methods.

use std::ops::Range;

use keel_array::{WeightFormat, WeightSpec};
use keel_weights::RotationValues;

use super::{Parameters, RowSink};
use crate::Result;

macro_rules! forward {
    ($(fn $name:ident(&self $(, $argument:ident: $kind:ty)*) $(-> $result:ty)?;)*) => {
        /// Parameters that differ from others in the methods that an implementation defines. All other methods are
        /// those of the others.
        pub trait Altered: Sync {
            /// The others.
            fn inner(&self) -> &dyn Parameters;

            $(
                /// As the method of this name of [`Parameters`].
                ///
                /// # Errors
                /// As there.
                fn $name(&self $(, $argument: $kind)*) $(-> $result)? {
                    self.inner().$name($($argument),*)
                }
            )*
        }

        impl<T: Altered> Parameters for T {
            $(
                fn $name(&self $(, $argument: $kind)*) $(-> $result)? {
                    Altered::$name(self $(, $argument)*)
                }
            )*
        }
    };
}

// All methods of `Parameters`.
forward! {
    fn contains(&self, name: &str) -> bool;
    fn shape(&self, name: &str) -> Option<Vec<usize>>;
    fn linear_format(&self, module: &str, experts: Option<usize>, rows: usize, cols: usize) -> Result<WeightFormat>;
    fn linear_rows(
        &self, module: &str, expert: Option<usize>, rows: Range<usize>, spec: &WeightSpec, sink: &mut RowSink<'_>
    ) -> Result<()>;
    fn rotation(&self, prefix: &str, module: &str) -> Result<Option<RotationValues>>;
    fn release(&self, module: &str);
    fn values(&self, name: &str, elements: usize) -> Result<Vec<f32>>;
    fn rows_are_alike(&self) -> bool;
    fn norms_are_scales(&self) -> bool;
    fn column_tiles(&self, module: &str) -> usize;
}
