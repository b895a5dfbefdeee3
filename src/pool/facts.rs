//! What a model file tells of itself beside its architecture: how large it is, how it is stored.
//!
//! Pure reading of a file's tables; no tensor is touched.

use crate::format::ModelFile;
use std::collections::BTreeMap;

/// Where GGUF files say how they were quantized.
const FILE_TYPE_KEY: &str = "general.file_type";

/// Numbers in all tensors.
pub(super) fn n_parameters(file: &ModelFile) -> u64 {
    let numbers = |dims: &[u64]| dims.iter().product::<u64>();
    file.tensors().iter().map(|it| numbers(&it.dims)).sum()
}

/// The name of the mix that the file says it is, else the type that most numbers have.
pub(super) fn quantization(file: &ModelFile) -> String {
    let told = file.optional_u32(FILE_TYPE_KEY).ok().flatten();
    if let Some(name) = told.and_then(mix_name) {
        return name.to_owned();
    }
    let mut by_type = BTreeMap::new();
    for tensor in file.tensors() {
        let n: u64 = tensor.dims.iter().product();
        *by_type.entry(format!("{:?}", tensor.dtype)).or_insert(0) += n;
    }
    let most = by_type.into_iter().max_by_key(|(_, n)| *n);
    most.map_or_else(String::new, |(name, _)| name)
}

/// Names of `general.file_type`, as model makers write them.
fn mix_name(file_type: u32) -> Option<&'static str> {
    Some(match file_type {
        0 => "F32",
        1 => "F16",
        2 => "Q4_0",
        3 => "Q4_1",
        7 => "Q8_0",
        8 => "Q5_0",
        9 => "Q5_1",
        10 => "Q2_K",
        11 => "Q3_K_S",
        12 => "Q3_K_M",
        13 => "Q3_K_L",
        14 => "Q4_K_S",
        15 => "Q4_K_M",
        16 => "Q5_K_S",
        17 => "Q5_K_M",
        18 => "Q6_K",
        25 => "IQ4_NL",
        32 => "BF16",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn a_file_tells_its_size_and_kind() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/models/tiny_llama.gguf");
        let file = ModelFile::open_gguf(&path).expect("a fixture");
        let n = n_parameters(&file);
        assert!(n > 1000 && n < file.file_len(), "{n}");
        assert!(!quantization(&file).is_empty());
        assert_eq!((mix_name(15), mix_name(9999)), (Some("Q4_K_M"), None));
    }
}
