//! The dequantization oracle against values that another implementation read out of random blocks
//! (`tests/scripts/make_dequant_fixture.py` made them).

use serde_json::Value;
use tinyloop::backend::reference::dequant::dequantize;
use tinyloop::dtype::DType;

#[test]
fn every_type_equals_the_other_implementation() {
    let entries: Vec<Value> = serde_json::from_str(include_str!("data/dequant.json")).unwrap();
    assert_eq!(entries.len(), DType::ALL.len() - 1, "all types but F32");
    for entry in &entries {
        let name = entry["type"].as_str().unwrap();
        let dtype = DType::ALL
            .into_iter()
            .find(|dtype| dtype.to_string() == name)
            .unwrap();
        let bytes: Vec<u8> = entry["bytes"]
            .as_array()
            .unwrap()
            .iter()
            .map(|b| b.as_u64().unwrap() as u8)
            .collect();
        let wanted: Vec<f32> = entry["values"]
            .as_array()
            .unwrap()
            .iter()
            .map(|v| v.as_f64().unwrap() as f32)
            .collect();
        let mut found = vec![0.0_f32; wanted.len()];
        dequantize(dtype, &bytes, &mut found);
        for (index, (a, b)) in found.iter().zip(&wanted).enumerate() {
            // The order of the multiplications may differ by a rounding or two.
            assert!(
                (a - b).abs() <= b.abs() * 4e-7 + 1e-6,
                "{name}[{index}]: {a} against {b}"
            );
        }
    }
}

#[test]
fn f32_is_copied_bit_for_bit() {
    let mut found = [0.0_f32; 2];
    let bytes = [1.5_f32.to_le_bytes(), (-0.0_f32).to_le_bytes()].concat();
    dequantize(DType::F32, &bytes, &mut found);
    assert_eq!(
        found.map(f32::to_bits),
        [1.5_f32.to_bits(), (-0.0_f32).to_bits()]
    );
}
