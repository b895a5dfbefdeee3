//! Where the built-in engine runs a model: `device`.
//!
//! Plain data. What is not here: which devices there are (`backend::cuda`), the choice (`runtime::device`).

use serde::Deserialize;
use std::fmt;
use std::str::FromStr;

/// What was asked for, as `cpu`, `auto`, `cuda` or `cuda:N`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum DeviceChoice {
    /// The processor. The default, until the CUDA kernels have been verified on real GPUs.
    #[default]
    Cpu,
    /// The GPUs that can be used, one after another for the replicas; the processor where there is none.
    Auto,
    /// The same, and an error where there is none.
    Cuda,
    /// One GPU by its number.
    CudaNumber(u32),
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Auto => f.write_str("auto"),
            Self::Cuda => f.write_str("cuda"),
            Self::CudaNumber(number) => write!(f, "cuda:{number}"),
        }
    }
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = text.strip_prefix("cuda:").map(str::parse);
        match (text, number) {
            ("cpu", _) => Ok(Self::Cpu),
            ("auto", _) => Ok(Self::Auto),
            ("cuda", _) => Ok(Self::Cuda),
            (_, Some(Ok(number))) => Ok(Self::CudaNumber(number)),
            _ => Err(format!(
                "\"{text}\" is no device; it must be cpu, auto, cuda or cuda:N, like cuda:0"
            )),
        }
    }
}

impl TryFrom<String> for DeviceChoice {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_written_as_they_are_read() {
        for text in ["cpu", "auto", "cuda", "cuda:0", "cuda:17"] {
            let choice: Result<DeviceChoice, String> = text.parse();
            assert_eq!(choice.map(|choice| choice.to_string()), Ok(text.to_owned()));
        }
        for wrong in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "CPU"] {
            let error = wrong.parse::<DeviceChoice>().expect_err(wrong);
            assert!(error.contains("cuda:N"), "{error}");
        }
    }
}
