//! On which devices the replicas of a native model run.
//!
//! The decision is pure: what was asked for, and what the driver lists. What is not here: asking the
//! driver (`backend::cuda`), memory (`pool::ledger`).

use super::native::BackendKind;
use crate::backend::cuda::{self, CudaDevice};
use crate::config::{DeviceChoice, EngineConfig};

/// The GPUs of the machine, or why there are none.
pub type Found = Result<Vec<CudaDevice>, String>;

/// Where replicas go: replica `i` to `kinds[i % n]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Places {
    /// At least one.
    pub kinds: Vec<BackendKind>,
    /// Why it is the processor although a GPU would have been welcome.
    pub fallback: Option<String>,
}

impl Places {
    fn cpu(fallback: Option<String>) -> Self {
        Self {
            kinds: vec![BackendKind::Cpu],
            fallback,
        }
    }
}

/// The places for a model.
///
/// # Errors
/// A GPU was demanded and there is none that can be used; in words for the operator.
pub fn places(config: &EngineConfig, found: &Found) -> Result<Places, String> {
    let graphs = config.cuda_graphs;
    let on = |number: u32| BackendKind::Cuda { number, graphs };
    let usable = || -> Vec<BackendKind> {
        let devices = found.iter().flatten();
        let usable = devices.filter(|device| device.problem.is_none());
        usable.map(|device| on(device.ordinal as u32)).collect()
    };
    match config.device {
        DeviceChoice::Cpu => Ok(Places::cpu(None)),
        DeviceChoice::Auto | DeviceChoice::Cuda => match (usable(), config.device) {
            (kinds, _) if !kinds.is_empty() => Ok(Places {
                kinds,
                fallback: None,
            }),
            (_, DeviceChoice::Auto) => Ok(Places::cpu(Some(why_none(found)))),
            _ => Err(format!("device = \"cuda\": {}", why_none(found))),
        },
        DeviceChoice::CudaNumber(number) => {
            if usable().contains(&on(number)) {
                let kinds = vec![on(number)];
                let fallback = None;
                return Ok(Places { kinds, fallback });
            }
            let devices = found.as_deref().unwrap_or_default();
            let listed = devices.iter().find(|one| one.ordinal as u32 == number);
            Err(match listed {
                Some(device) => format!("device = \"{}\"", problem_of(device)),
                None if devices.is_empty() => {
                    format!("device = \"cuda:{number}\": {}", why_none(found))
                }
                None => format!(
                    "device = \"cuda:{number}\": the driver lists cuda:0 to cuda:{}",
                    devices.len() - 1
                ),
            })
        }
    }
}

/// Where a model with one replica runs, for subcommands; asks the driver only where a GPU may be meant.
///
/// # Errors
/// See [`places`].
pub fn only_place(config: &EngineConfig) -> Result<BackendKind, String> {
    let found = match config.device {
        DeviceChoice::Cpu => Ok(Vec::new()),
        _ => cuda::devices(),
    };
    let places = places(config, &found)?;
    if let Some(why) = &places.fallback {
        tracing::warn!(%why, "running on the processor");
    }
    Ok(places.kinds[0])
}

fn problem_of(device: &CudaDevice) -> String {
    let problem = device.problem.as_deref().unwrap_or("it can be used");
    format!("cuda:{} ({}): {problem}", device.ordinal, device.name)
}

fn why_none(found: &Found) -> String {
    match found {
        Err(why) => why.clone(),
        Ok(devices) if devices.is_empty() => "the CUDA driver finds no GPU".to_owned(),
        Ok(devices) => {
            let problems: Vec<String> = devices.iter().map(problem_of).collect();
            format!("no GPU can be used: {}", problems.join("; "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(ordinal: usize, problem: Option<&str>) -> CudaDevice {
        CudaDevice {
            ordinal,
            name: "A".to_owned(),
            total_bytes: 1,
            free_bytes: 1,
            capability: (8, 0),
            problem: problem.map(str::to_owned),
        }
    }

    fn asked(choice: &str, found: &Found) -> Result<(Vec<Option<u32>>, Option<String>), String> {
        let config = EngineConfig {
            device: choice.parse()?,
            ..EngineConfig::default()
        };
        let places = places(&config, found)?;
        let numbers = places.kinds.iter().map(|kind| match kind {
            BackendKind::Cuda { number, .. } => Some(*number),
            _ => None,
        });
        Ok((numbers.collect(), places.fallback))
    }

    #[test]
    fn gpus_are_taken_where_they_can_be_used() {
        let found = Ok(vec![
            device(0, None),
            device(1, Some("old")),
            device(2, None),
        ]);
        let both = Ok((vec![Some(0), Some(2)], None));
        assert_eq!(asked("auto", &found), both);
        assert_eq!(asked("cuda", &found), both);
        assert_eq!(asked("cuda:2", &found), Ok((vec![Some(2)], None)));
        assert_eq!(asked("cpu", &found), Ok((vec![None], None)));
        let old = asked("cuda:1", &found).expect_err("too old");
        assert!(old.contains("cuda:1 (A): old"), "{old}");
        let beyond = asked("cuda:3", &found).expect_err("there are three");
        assert!(beyond.contains("cuda:0 to cuda:2"), "{beyond}");
    }

    #[test]
    fn without_a_gpu_auto_falls_back_and_cuda_is_an_error() {
        let none: [(Found, &str); 3] = [
            (Err("no driver".to_owned()), "no driver"),
            (Ok(Vec::new()), "finds no GPU"),
            (Ok(vec![device(0, Some("old"))]), "cuda:0 (A): old"),
        ];
        for (found, why) in &none {
            let (places, fallback) = asked("auto", found).expect("falls back");
            assert_eq!(places, [None]);
            assert!(fallback.is_some_and(|text| text.contains(why)));
            for choice in ["cuda", "cuda:0"] {
                let error = asked(choice, found).expect_err(choice);
                assert!(error.contains(why), "{choice}: {error}");
            }
            assert_eq!(asked("cpu", found), Ok((vec![None], None)));
        }
    }
}
