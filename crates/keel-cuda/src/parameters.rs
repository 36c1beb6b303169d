//! Parameters of kernels, each list described once.
//!
//! A description gives the Rust struct of a launch's arguments, and the text of the parameter list that the kernel
//! includes between its parentheses:
//!
//! ```text
//! extern "C" __global__ void check_batch(
//! #include "check_batch.params"
//! ) {
//! ```
//!
//! | Rust | CUDA |
//! |---|---|
//! | `u64` | a pointer |
//! | `usize` | `u32` |
//! | [`Wide`] | `u64`, `i64` |
//! | `f32`, `f64` | `float`, `double` |
//! | `[u64; N]` | a structure of `N` words of 64 bits |
//! | `Option<u64>`, `Option<usize>` | a pointer, a `u32` that exists only under a condition on the kernel's constants |
//!
//! Only kernels whose text is generated have no description: users' kernels, and chains of element-wise operations.

use crate::driver::Arguments;

/// A number of 64 bits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Wide(pub usize);

/// A value as kernels take it.
pub(crate) trait Parameter {
    fn push(&self, arguments: Arguments) -> Arguments;
}

impl Parameter for u64 {
    fn push(&self, arguments: Arguments) -> Arguments {
        arguments.push(&self.to_ne_bytes())
    }
}

impl<T: Parameter> Parameter for Option<T> {
    fn push(&self, arguments: Arguments) -> Arguments {
        self.iter().fold(arguments, |arguments, value| value.push(arguments))
    }
}

impl Parameter for usize {
    fn push(&self, arguments: Arguments) -> Arguments {
        let value = u32::try_from(*self).expect("the backend has checked the extents");
        arguments.push(&value.to_ne_bytes())
    }
}

impl Parameter for Wide {
    fn push(&self, arguments: Arguments) -> Arguments {
        arguments.push(&(self.0 as u64).to_ne_bytes())
    }
}

impl Parameter for f32 {
    fn push(&self, arguments: Arguments) -> Arguments {
        arguments.push(&self.to_ne_bytes())
    }
}

impl Parameter for f64 {
    fn push(&self, arguments: Arguments) -> Arguments {
        arguments.push(&self.to_ne_bytes())
    }
}

impl<const N: usize> Parameter for [u64; N] {
    fn push(&self, arguments: Arguments) -> Arguments {
        let bytes: Vec<u8> = self.iter().flat_map(|word| word.to_ne_bytes()).collect();
        arguments.push(&bytes)
    }
}

/// A parameter of a kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Described {
    pub name: &'static str,
    /// The type in CUDA C++.
    pub c_type: &'static str,
    /// The type of the struct's field.
    #[cfg_attr(not(test), allow(dead_code, reason = "checked by a test"))]
    pub rust_type: &'static str,
    /// The condition on the kernel's constants under which the parameter exists; empty if it always exists.
    pub condition: &'static str,
}

/// A parameter list.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ParameterList {
    /// Name of the file that the kernel includes.
    pub file: &'static str,
    /// The entry points that have these parameters.
    pub entries: &'static [&'static str],
    pub parameters: &'static [Described],
}

impl ParameterList {
    /// The text between the parentheses of the kernel.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for (i, Described { name, c_type, condition, .. }) in self.parameters.iter().enumerate() {
            let comma = if i == 0 { "" } else { ", " };
            let line = format!("{comma}{c_type} {name}\n");
            match *condition {
                "" => text.push_str(&line),
                condition => text.extend(["#if ", condition, "\n", &line, "#endif\n"]),
            }
        }
        text
    }
}

/// The arguments of a launch.
pub(crate) trait Parameters {
    /// The description.
    const LIST: ParameterList;

    /// The values, in order.
    ///
    /// # Panics
    /// If the entry point has other parameters.
    fn arguments(&self, entry: &str) -> Arguments;
}

macro_rules! parameters {
    ($($(#[$doc:meta])* $struct:ident = $file:literal of [$($entry:literal),+] {
        $($field:ident: $rust:ty = $c:literal $(if $condition:literal)?),+ $(,)?
    })+) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Debug, PartialEq)]
            pub(crate) struct $struct {
                $(pub $field: $rust,)+
            }

            impl Parameters for $struct {
                const LIST: ParameterList = ParameterList {
                    file: $file,
                    entries: &[$($entry),+],
                    parameters: &[$(Described {
                        name: stringify!($field),
                        c_type: $c,
                        rust_type: stringify!($rust),
                        condition: concat!("" $(, $condition)?),
                    }),+],
                };

                fn arguments(&self, entry: &str) -> Arguments {
                    assert!(Self::LIST.entries.contains(&entry), "{entry} does not have {}", $file);
                    let arguments = Arguments::default();
                    $(let arguments = self.$field.push(arguments);)+
                    arguments
                }
            }
        )+

        /// Every parameter list.
        pub(crate) const LISTS: &[ParameterList] = &[$($struct::LIST),+];
    };
}

mod lists;

pub(crate) use lists::*;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::SOURCES;

    /// The Rust type of a parameter of this type.
    fn rust_type(parameter: &Described) -> String {
        match (parameter.c_type, parameter.condition) {
            (pointer, "") if pointer.ends_with('*') => "u64".into(),
            (pointer, _) if pointer.ends_with('*') => "Option<u64>".into(),
            ("u32", "") => "usize".into(),
            ("u32", _) => "Option<usize>".into(),
            ("u64" | "i64", "") => "Wide".into(),
            ("float", "") => "f32".into(),
            ("double", "") => "f64".into(),
            // The sources assert the sizes of these structures.
            ("Heads", "") => "[u64; 3]".into(),
            ("RopeArgs", "") => "[u64; 4]".into(),
            ("const __grid_constant__ Mailboxes", "") => "[u64; 8]".into(),
            ("Strides", "") => "[u64; 17]".into(),
            ("Moves", "") => "[u64; 144]".into(),
            (other, condition) => panic!("{other} if {condition:?} has no type in Rust"),
        }
    }

    #[test]
    fn each_parameter_has_the_type_that_the_kernel_takes() {
        for list in LISTS {
            for parameter in list.parameters {
                let (got, name) = (parameter.rust_type.replace(' ', ""), parameter.name);
                assert_eq!(got, rust_type(parameter).replace(' ', ""), "{}: {name}", list.file);
            }
            assert_eq!(list.parameters[0].condition, "", "{}: the first has no comma", list.file);
        }
    }

    /// Each kernel takes its parameters from a description and has no others. The list of a chain is generated.
    #[test]
    fn kernels_include_their_parameters() {
        for list in LISTS {
            for entry in list.entries {
                let signature = format!("{entry}(\n#include \"{}\"\n) {{", list.file);
                let found = SOURCES.iter().filter(|source| source.text.contains(&signature)).count();
                assert_eq!(found, 1, "{signature}");
            }
        }
        let described = SOURCES.iter().flat_map(|source| source.text.match_indices(".params\"")).count();
        assert_eq!(described, LISTS.iter().map(|list| list.entries.len()).sum::<usize>());
        let kernels = SOURCES.iter().flat_map(|source| source.text.match_indices("__global__")).count();
        assert_eq!(kernels, described + ["chain", "chain_by_four"].len());
    }

    #[test]
    fn a_list_is_the_text_between_parentheses() {
        let conditional: String =
            Attend::LIST.text().lines().skip(13).map(|line| format!("{line};")).collect();
        assert_eq!(conditional, ", float* y;#if UNTIL;, const u32* until;#endif;");
        assert!(CheckBatch::LIST.text().starts_with("u32* row_start\n, u32* slot\n"));
    }
}
