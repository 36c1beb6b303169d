//! cuBLASLt: products of 16-bit and 8-bit floats on tensor cores, which give f32 or f16.

use super::Device;
use super::survey::Version;
use crate::CudaError;
use crate::error::Result;
use cudarc::cublaslt::{result, sys};
use std::collections::HashMap;
use std::sync::Mutex;

/// Scratch that the library gets for each product, in bytes: the size that NVIDIA advises for Hopper.
pub(crate) const WORKSPACE_BYTES: usize = 32 << 20;

/// The type of the factors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum FactorType {
    Bf16,
    F16,
    /// 8 bits, with an f32 scale for each row of x and of w. `cols` and `inner` are multiples of 16.
    E4m3,
}

/// The type of a product's result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ResultType {
    F32,
    /// f16 of an eighth, as `half.cuh` has x. Values beyond the range become infinite. Never accumulated.
    EighthF16,
}

/// The addresses of a product's operands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProductOperands {
    pub x: u64,
    pub w: u64,
    pub y: u64,
    /// f32 `[cols]`. Read for a [`Product`] with a bias alone.
    pub bias: u64,
    /// Read for [`FactorType::E4m3`] alone.
    pub scales: ScaleAddresses,
}

/// The addresses of the scales of x and of w: f32 `[rows]` and `[cols]`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ScaleAddresses {
    pub x: u64,
    pub w: u64,
}

/// `y [rows, cols] = alpha x [rows, inner] w [cols, inner]^T`; added to the values in y if `accumulate`. With `bias`, a
/// value for each column of y is added, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Product {
    pub rows: usize,
    pub cols: usize,
    pub inner: usize,
    pub alpha: u8,
    pub accumulate: bool,
    pub bias: bool,
    pub factors: FactorType,
    pub result: ResultType,
}

struct Plan {
    description: sys::cublasLtMatmulDesc_t,
    weight: sys::cublasLtMatrixLayout_t,
    input: sys::cublasLtMatrixLayout_t,
    output: sys::cublasLtMatrixLayout_t,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: created once by `plan`, destroyed once.
        unsafe {
            let _ = result::destroy_matmul_desc(self.description);
            for layout in [self.weight, self.input, self.output] {
                let _ = result::destroy_matrix_layout(layout);
            }
        }
    }
}

/// The library's choice for each product so far, or why it refuses it.
type Plans = HashMap<Product, Result<Plan, result::CublasError>>;

/// The library's handle and choices.
pub(crate) struct Blas {
    handle: sys::cublasLtHandle_t,
    plans: Mutex<Plans>,
}

// SAFETY: the library's handle may be used from any thread, and a lock protects the plans.
unsafe impl Send for Blas {}
// SAFETY: as above.
unsafe impl Sync for Blas {}

fn refused(call: &'static str) -> impl Fn(result::CublasError) -> CudaError {
    use sys::cublasStatus_t as Status;
    move |error| {
        let reason = format!("{error:?}");
        match error.0 {
            Status::CUBLAS_STATUS_ALLOC_FAILED => CudaError::OutOfMemory { call },
            Status::CUBLAS_STATUS_NOT_SUPPORTED
            | Status::CUBLAS_STATUS_ARCH_MISMATCH
            | Status::CUBLAS_STATUS_INVALID_VALUE => CudaError::NoProduct { call, reason },
            _ => CudaError::Driver { call, reason },
        }
    }
}

/// Sets an attribute of a product.
///
/// # Safety
/// `description` must be alive, and `T` the attribute's type.
unsafe fn set<T>(
    description: sys::cublasLtMatmulDesc_t,
    attribute: sys::cublasLtMatmulDescAttributes_t,
    value: T,
) -> Result<(), result::CublasError> {
    let size = size_of::<T>();
    // SAFETY: as the caller promises; the library copies the value.
    unsafe { result::set_matmul_desc_attribute(description, attribute, (&raw const value).cast(), size) }
}

/// Sets the addresses that are part of a product's description: of the bias, and of the scales. The library's A is w,
/// and its B is x.
///
/// # Safety
/// `description` must be alive.
unsafe fn set_addresses(
    description: sys::cublasLtMatmulDesc_t,
    product: Product,
    operands: &ProductOperands,
) -> Result<(), result::CublasError> {
    use sys::cublasLtMatmulDescAttributes_t as Attribute;
    // SAFETY: the description is alive; these attributes are addresses.
    unsafe {
        if product.bias {
            set(description, Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, operands.bias)?;
        }
        if product.factors == FactorType::E4m3 {
            set(description, Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, operands.scales.w)?;
            set(description, Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, operands.scales.x)?;
        }
    }
    Ok(())
}

fn is_present() -> Result<()> {
    // SAFETY: asks the loader whether the library can be opened.
    if unsafe { sys::is_culib_present() } {
        return Ok(());
    }
    let advice = "it is part of the CUDA toolkit and of the package nvidia-cublas; install either, and name its \
                  folder in LD_LIBRARY_PATH";
    Err(CudaError::Missing { library: "libcublasLt", advice })
}

/// The library's version.
pub(super) fn version() -> Result<Version> {
    is_present()?;
    // SAFETY: asks a library that is there for a number; it needs no device.
    let version = unsafe { sys::cublasLtGetVersion() };
    // 130001 is 13.0.1.
    Ok((version as u32 / 10_000, version as u32 % 10_000 / 100))
}

impl Blas {
    /// The library, for a device. A handle belongs to the device that is current when it is created: the library
    /// prepares its kernels there alone.
    pub fn new(device: &Device) -> Result<Blas> {
        is_present()?;
        device.bind()?;
        let handle = result::create_handle().map_err(refused("cublasLtCreate"))?;
        Ok(Blas { handle, plans: Mutex::default() })
    }

    fn plan(&self, product: Product, operands: &ProductOperands) -> Result<Plan, result::CublasError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let Product { rows, cols, inner, .. } = product;
        let description = result::create_matmul_desc(
            sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            sys::cudaDataType_t::CUDA_R_32F,
        )?;
        // The library's matrices are column-major: row-major [cols, inner] is its [inner, cols], to be transposed.
        let factor = match product.factors {
            FactorType::Bf16 => sys::cudaDataType_t::CUDA_R_16BF,
            FactorType::F16 => sys::cudaDataType_t::CUDA_R_16F,
            FactorType::E4m3 => sys::cudaDataType_t::CUDA_R_8F_E4M3,
        };
        let weight = result::create_matrix_layout(factor, inner as u64, cols as u64, inner as i64)?;
        let input = result::create_matrix_layout(factor, inner as u64, rows as u64, inner as i64)?;
        let single = sys::cudaDataType_t::CUDA_R_32F;
        let written = match product.result {
            ResultType::F32 => single,
            ResultType::EighthF16 => sys::cudaDataType_t::CUDA_R_16F,
        };
        let output = result::create_matrix_layout(written, cols as u64, rows as u64, cols as i64)?;
        let algorithm = sys::cublasLtMatmulAlgo_t { data: [0; 8] };
        let mut plan = Plan { description, weight, input, output, algorithm };
        let preference = result::create_matmul_pref()?;
        let workspace_bytes = WORKSPACE_BYTES;
        // SAFETY: every handle was just created; attributes are set from values of the size given.
        let chosen = unsafe {
            set(description, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, 1i32)?;
            set_addresses(description, product, operands)?;
            if product.bias {
                // The library's matrices have a column for each row of ours, and a bias is one of its columns.
                let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
                set(description, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue)?;
                set(description, Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, single)?;
            }
            if product.factors == FactorType::E4m3 {
                let mode = sys::cublasLtMatmulMatrixScale_t::CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
                // The tensor core then adds more products before it hands a sum to f32 registers. It keeps fewer bits
                // of such a sum than f32 has, and still far more than the factors have.
                set(description, Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM, 1i8)?;
                set(description, Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, mode)?;
                set(description, Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, mode)?;
            }
            result::set_matmul_pref_attribute(
                preference,
                sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                (&raw const workspace_bytes).cast(),
                size_of_val(&workspace_bytes),
            )?;
            let chosen = result::get_matmul_algo_heuristic(
                self.handle,
                description,
                weight,
                input,
                output,
                output,
                preference,
            );
            result::destroy_matmul_pref(preference)?;
            chosen?
        };
        plan.algorithm = chosen.algo;
        Ok(plan)
    }

    /// The plan of a product, made when it is first asked for. A refusal is remembered, because the library must not be
    /// asked while a graph is recorded.
    fn plan_of<'a>(
        &self,
        product: Product,
        operands: &ProductOperands,
        plans: &'a mut Plans,
    ) -> Result<&'a mut Plan> {
        let plan = plans.entry(product).or_insert_with(|| self.plan(product, operands));
        plan.as_mut().map_err(|error| refused("cublasLtMatmulAlgoGetHeuristic")(*error))
    }

    /// Whether the library has a kernel for a product on the device that is current. It runs nothing.
    pub fn takes(&self, product: Product, operands: &ProductOperands) -> Result<()> {
        let mut plans = self.plans.lock().unwrap_or_else(|e| e.into_inner());
        self.plan_of(product, operands, &mut plans).map(drop)
    }

    /// Puts a product on the device's stream.
    ///
    /// # Safety
    /// The addresses must be those of device memory of the product's sizes, and `workspace` of
    /// [`WORKSPACE_BYTES`] from a multiple of 256 bytes on, until the stream has passed it.
    pub unsafe fn multiply(
        &self,
        device: &Device,
        product: Product,
        operands: ProductOperands,
        workspace: u64,
    ) -> Result<()> {
        let mut plans = self.plans.lock().unwrap_or_else(|e| e.into_inner());
        let plan = self.plan_of(product, &operands, &mut plans)?;
        // SAFETY: the plan's description is alive.
        unsafe { set_addresses(plan.description, product, &operands) }
            .map_err(refused("cublasLtMatmulDescSetAttribute"))?;
        let ProductOperands { x, w, y, .. } = operands;
        let unit = if product.result == ResultType::EighthF16 { 0.125 } else { 1f32 };
        let (alpha, beta) = (unit * f32::from(product.alpha), if product.accumulate { 1f32 } else { 0f32 });
        // SAFETY: the plan's handles are alive; the addresses are as the caller promises.
        let outcome = unsafe {
            result::matmul(
                self.handle,
                plan.description,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                w as *const _,
                plan.weight,
                x as *const _,
                plan.input,
                y as *const _,
                plan.output,
                y as *mut _,
                plan.output,
                &plan.algorithm,
                workspace as *mut _,
                WORKSPACE_BYTES,
                device.stream().cast(),
            )
        };
        outcome.map_err(refused("cublasLtMatmul"))
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        self.plans.get_mut().unwrap_or_else(|e| e.into_inner()).clear();
        // SAFETY: created by `new`, destroyed once.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sys::cublasStatus_t as Status;

    /// Another kernel may only take the place of a product that the library lacks. A launch that fails, because its
    /// capture has ended for example, is repeated with the library.
    #[test]
    fn only_a_refused_product_has_no_kernel() {
        let error = |status| refused("cublasLtMatmul")(result::CublasError(status));
        for status in [Status::CUBLAS_STATUS_NOT_SUPPORTED, Status::CUBLAS_STATUS_INVALID_VALUE] {
            assert!(matches!(error(status), CudaError::NoProduct { .. }), "{status:?}");
        }
        for status in [Status::CUBLAS_STATUS_EXECUTION_FAILED, Status::CUBLAS_STATUS_INTERNAL_ERROR] {
            assert!(matches!(error(status), CudaError::Driver { .. }), "{status:?}");
        }
        let full = error(Status::CUBLAS_STATUS_ALLOC_FAILED);
        assert!(matches!(full, CudaError::OutOfMemory { .. }));
    }
}
