//! `keel doctor`: facts about the machine, and advice on missing parts.

mod host;
mod nccl;

use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::Args;
use keel_cpu::isa::Isa;
use keel_cpu::memory::{GroupMemory, SystemMemory};
use keel_cuda::{CudaError, GpuFacts, Survey, Version};
use serde_json::{Value, json};

use crate::output;
use evenkeel::human_bytes;
use evenkeel::machine;
use host::Processor;
use nccl::Nccl;

/// Free memory below this leads to advice.
const LITTLE_BYTES: u64 = 1 << 30;

/// Print the facts that keel finds on this machine (cores, instructions, memory, GPUs, libraries, caches), and advice
/// on each problem.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &DoctorArgs) -> Result<()> {
    let findings = Findings::look();
    if args.json { output::json(&findings.to_json()) } else { output::text(&findings.to_text()) }
}

/// A cache folder and its size.
struct CacheFacts {
    what: &'static str,
    folder: Option<PathBuf>,
    bytes: u64,
    is_writable: bool,
}

impl CacheFacts {
    fn look(what: &'static str, folder: Option<PathBuf>) -> CacheFacts {
        let bytes = folder.as_deref().map_or(0, bytes_below);
        let is_writable = folder.as_deref().is_some_and(is_writable);
        CacheFacts { what, folder, bytes, is_writable }
    }
}

/// All facts.
struct Findings {
    processor: Processor,
    instructions: Vec<(&'static str, bool)>,
    isa: Isa,
    memory: SystemMemory,
    survey: Survey,
    nccl: Option<Nccl>,
    nvidia_devices: usize,
    caches: Vec<CacheFacts>,
}

impl Findings {
    fn look() -> Findings {
        let survey = machine().clone();
        let caches = vec![
            #[cfg(feature = "hub")]
            CacheFacts::look("models", crate::source::hub::cache_folder().ok()),
            CacheFacts::look("kernels", survey.kernel_cache.clone()),
        ];
        Findings {
            processor: Processor::look(),
            instructions: host::instructions(),
            isa: Isa::best(),
            memory: SystemMemory::look(),
            survey,
            nccl: Nccl::look(),
            nvidia_devices: host::nvidia_devices(),
            caches,
        }
    }

    /// Advice, one sentence per item; empty if all is well.
    fn advice(&self) -> Vec<String> {
        let mut advice = Vec::new();
        if self.isa == Isa::Portable {
            advice.push(
                "the processor has none of AVX2, AVX-512 and AMX: keel runs, many times slower".to_string(),
            );
        }
        if self.processor.has_amx && self.isa < Isa::Amx {
            advice.push(
                "the processor has AMX, which the system does not grant: it takes Linux 5.16 or newer, and a virtual machine \
                 that passes it on"
                    .into(),
            );
        }
        if let Some(free) = self.memory.free().filter(|&free| free < LITTLE_BYTES) {
            advice.push(format!("only {} of memory are free: end other programs", human_bytes(free)));
        }
        let has_gpus = !self.survey.gpus.is_empty();
        match &self.survey.driver {
            Err(error) if self.nvidia_devices > 0 => {
                advice.push(format!("{} NVIDIA GPUs are on the bus, but {error}", self.nvidia_devices));
            }
            Err(error @ CudaError::DriverTooOld { .. }) => advice.push(error.to_string()),
            _ => {}
        }
        if has_gpus {
            let libraries = [&self.survey.compiler, &self.survey.blas];
            advice.extend(
                libraries.into_iter().filter_map(|found| found.as_ref().err()).map(CudaError::to_string),
            );
        }
        if self.survey.gpus.len() > 1 {
            advice.extend(nccl::problem(self.nccl.as_ref()));
        }
        for gpu in self.survey.gpus.iter().filter(|gpu| !gpu.is_supported()) {
            advice.push(format!("{} is of a generation before 8.0 and is not used", gpu.name));
        }
        for cache in self.caches.iter().filter(|cache| !cache.is_writable) {
            let folder =
                cache.folder.as_ref().map_or("nowhere".into(), |folder| folder.display().to_string());
            let variable = if cache.what == "models" { "HF_HOME" } else { "KEEL_CACHE_DIR" };
            advice.push(format!(
                "{} cannot be kept in {folder}: set {variable} to a folder of yours",
                cache.what
            ));
        }
        advice
    }

    fn to_json(&self) -> Value {
        let instructions = self.instructions.iter().map(|(name, has)| (name.to_string(), Value::from(*has)));
        let cache = |cache: &CacheFacts| {
            json!({
                "what": cache.what,
                "path": cache.folder,
                "bytes": cache.bytes,
                "writable": cache.is_writable,
            })
        };
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "system": format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            "cpu": {
                "name": self.processor.name,
                "cores": self.processor.physical,
                "threads": self.processor.logical,
                "usable_threads": self.processor.usable,
                "instructions": instructions.collect::<Value>(),
                "kernels": self.isa.to_string(),
            },
            "memory": {
                "total": self.memory.total,
                "available": self.memory.available,
                "limit": self.memory.group.map(|group| group.limit),
                "free": self.memory.free(),
            },
            "gpus": self.survey.gpus.iter().map(gpu_json).collect::<Vec<_>>(),
            "driver": found_json(&self.survey.driver),
            "nvrtc": found_json(&self.survey.compiler),
            "cublaslt": found_json(&self.survey.blas),
            "nccl": nccl::to_json(self.nccl.as_ref()),
            "caches": self.caches.iter().map(cache).collect::<Vec<_>>(),
            "advice": self.advice(),
        })
    }

    fn to_text(&self) -> String {
        let mut rows: Vec<(&str, String)> = vec![
            (
                "keel",
                format!("{}, {} {}", env!("CARGO_PKG_VERSION"), std::env::consts::OS, std::env::consts::ARCH),
            ),
            ("processor", self.processor.name.clone().unwrap_or_else(|| "unknown".into())),
            ("cores", self.cores()),
            ("instructions", self.instructions_in_words()),
            ("memory", self.memory_in_words()),
        ];
        match &self.survey.gpus[..] {
            [] => rows.push(("GPU", "none".into())),
            gpus => rows.extend(gpus.iter().map(|gpu| ("GPU", gpu_in_words(gpu)))),
        }
        rows.push(("driver", found_in_words(&self.survey.driver, "supports CUDA ")));
        rows.push(("NVRTC", found_in_words(&self.survey.compiler, "")));
        rows.push(("cuBLASLt", found_in_words(&self.survey.blas, "")));
        rows.push(("NCCL", nccl::in_words(self.nccl.as_ref())));
        for cache in &self.caches {
            let folder =
                cache.folder.as_ref().map_or("nowhere".into(), |folder| folder.display().to_string());
            rows.push((cache.what, format!("{folder}, {}", human_bytes(cache.bytes))));
        }
        let mut text: String = rows.iter().map(|(name, value)| format!("{name:<14}{value}\n")).collect();
        let advice = self.advice();
        if advice.is_empty() {
            return text + "\nNothing that keel needs is missing.\n";
        }
        text += "\nWhat can be done:\n";
        text.extend(advice.iter().map(|line| format!("- {line}\n")));
        text
    }

    fn cores(&self) -> String {
        let Processor { logical, physical, usable, .. } = self.processor;
        let known = |n: Option<usize>| n.map_or("?".to_string(), |n| n.to_string());
        format!("{} with {} threads; {usable} for this process", known(physical), known(logical))
    }

    fn instructions_in_words(&self) -> String {
        let of = |wanted: bool| {
            let names = self.instructions.iter().filter(|(_, has)| *has == wanted).map(|(name, _)| *name);
            names.collect::<Vec<_>>().join(", ")
        };
        let (has, lacks) = (of(true), of(false));
        let lacks = if lacks.is_empty() { String::new() } else { format!("; not {lacks}") };
        let has = if has.is_empty() { "none that kernels are written for".into() } else { has };
        format!("{has}{lacks}; kernels for {} run", self.isa)
    }

    fn memory_in_words(&self) -> String {
        let known = |bytes: Option<u64>| bytes.map_or("unknown".to_string(), human_bytes);
        let SystemMemory { total, available, group } = self.memory;
        let mut text = format!("{} available of {}", known(available), known(total));
        if let Some(GroupMemory { limit, left }) = group {
            text +=
                &format!("; the control group allows {}, {} are left", human_bytes(limit), human_bytes(left));
        }
        text
    }
}

fn gpu_in_words(gpu: &GpuFacts) -> String {
    let free = gpu.free_bytes.map_or("unknown".to_string(), human_bytes);
    let (major, minor) = gpu.capability;
    let GpuFacts { ordinal, name, total_bytes, .. } = gpu;
    format!(
        "cuda:{ordinal} {name}, compute capability {major}.{minor}, {free} free of {}",
        human_bytes(*total_bytes)
    )
}

fn gpu_json(gpu: &GpuFacts) -> Value {
    json!({
        "device": format!("cuda:{}", gpu.ordinal),
        "name": gpu.name,
        "compute_capability": format!("{}.{}", gpu.capability.0, gpu.capability.1),
        "total": gpu.total_bytes,
        "free": gpu.free_bytes,
        "supported": gpu.is_supported(),
    })
}

fn found_in_words(found: &Result<Version, CudaError>, prefix: &str) -> String {
    match found {
        Ok((major, minor)) => format!("{prefix}{major}.{minor}"),
        Err(CudaError::Missing { library, .. }) => format!("none ({library} was not found)"),
        Err(error) => error.to_string(),
    }
}

/// The version, or null and the problem.
fn found_json(found: &Result<Version, CudaError>) -> Value {
    match found {
        Ok((major, minor)) => json!({"version": format!("{major}.{minor}")}),
        Err(error) => json!({"version": null, "problem": error.to_string()}),
    }
}

/// Bytes of all files below a folder. Links are not followed.
fn bytes_below(folder: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(folder) else { return 0 };
    let bytes = |entry: std::fs::DirEntry| match entry.metadata() {
        Ok(facts) if facts.is_dir() => bytes_below(&entry.path()),
        Ok(facts) if facts.is_file() => facts.len(),
        _ => 0,
    };
    entries.flatten().map(bytes).sum()
}

/// Whether a folder can be written, or created if it does not exist.
#[cfg(unix)]
fn is_writable(folder: &Path) -> bool {
    let existing = folder.ancestors().find(|folder| folder.exists());
    existing
        .is_some_and(|path| path.is_dir() && rustix::fs::access(path, rustix::fs::Access::WRITE_OK).is_ok())
}

#[cfg(not(unix))]
fn is_writable(_folder: &Path) -> bool {
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found() -> Findings {
        let survey = Survey {
            driver: Ok((13, 0)),
            gpus: Vec::new(),
            compiler: Ok((13, 0)),
            blas: Ok((13, 0)),
            kernel_cache: None,
        };
        Findings {
            processor: Processor { usable: 2, ..Processor::default() },
            instructions: vec![("AVX2", true), ("AMX", false)],
            isa: Isa::Avx2,
            memory: SystemMemory { total: Some(8 << 30), available: Some(4 << 30), group: None },
            survey,
            nccl: None,
            nvidia_devices: 0,
            caches: Vec::new(),
        }
    }

    fn gpu() -> GpuFacts {
        let name = "A GPU".to_string();
        GpuFacts { ordinal: 0, name, capability: (7, 5), total_bytes: 8 << 30, free_bytes: None }
    }

    fn missing(library: &'static str) -> Result<Version, CudaError> {
        Err(CudaError::Missing { library, advice: "install it" })
    }

    #[test]
    fn a_machine_without_a_gpu_lacks_nothing() {
        let mut findings = found();
        findings.survey =
            Survey { driver: missing("libcuda"), compiler: missing("libnvrtc"), ..findings.survey };
        assert_eq!(findings.advice(), [""; 0]);
        let text = findings.to_text();
        assert!(
            text.contains("none (libcuda was not found)") && text.contains("Nothing that keel needs"),
            "{text}"
        );
        assert!(
            text.contains("AVX2; not AMX; kernels for AVX2 run")
                && text.contains("4.0 GiB available of 8.0 GiB")
        );
    }

    #[test]
    fn several_gpus_need_a_library_more_than_one_does() {
        let mut findings = found();
        let lacks_it =
            |findings: &Findings| findings.advice().concat().contains("libnccl.so.2 was not found");
        findings.survey.gpus = vec![gpu()];
        assert!(!lacks_it(&findings));
        findings.survey.gpus.push(gpu());
        assert!(lacks_it(&findings));
        assert!(findings.to_text().contains("NCCL          none (libnccl.so.2 was not found)\n"));
        findings.nccl = Some(Nccl { file: "/x/libnccl.so.2".into(), version: Some((2, 27)) });
        assert!(!lacks_it(&findings) && findings.to_text().contains("NCCL          2.27, /x/libnccl.so.2\n"));
        assert_eq!(findings.to_json()["nccl"]["version"], "2.27");
    }

    #[test]
    fn each_thing_that_is_missing_has_its_advice() {
        let mut findings = found();
        findings.nvidia_devices = 2;
        findings.survey.driver = missing("libcuda");
        assert!(
            findings
                .advice()
                .concat()
                .contains("2 NVIDIA GPUs are on the bus, but libcuda was not found: install it")
        );
        let mut findings = found();
        findings.survey.gpus = vec![gpu()];
        findings.survey.compiler = missing("libnvrtc");
        findings.survey.blas = missing("libcublasLt");
        findings.processor.has_amx = true;
        findings.memory.group = Some(GroupMemory { limit: 1 << 30, left: 100 << 20 });
        findings.caches =
            vec![CacheFacts { what: "kernels", folder: Some("/x".into()), bytes: 0, is_writable: false }];
        let advice = findings.advice().join("\n");
        for part in
            ["libnvrtc", "libcublasLt", "before 8.0", "does not grant", "only 100 MiB", "set KEEL_CACHE_DIR"]
        {
            assert!(advice.contains(part), "{part}: {advice}");
        }
        assert_eq!(findings.to_json()["advice"].as_array().map(Vec::len), Some(6), "{advice}");
    }
}
