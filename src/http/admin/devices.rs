//! `GET /v1/admin/devices`: memory of the machine, what the ledger allows and counts, who holds it.
//!
//! The numbers of the machine count everybody; those of the ledger are the models of this server.
//! What can't be asked is said to be not available, with the reason, and leaves the rest alone.

use super::models;
use crate::http::ops::OpsAnswer;
use crate::http::state::ServerState;
use crate::pool::devices::{Gpu, GpuWatch, main_memory};
use crate::pool::ledger::DeviceId;
use crate::pool::{DeviceReport, DeviceShare};
use serde_json::{Value, json};

pub(super) fn answer(state: &ServerState, watch: &GpuWatch) -> OpsAnswer {
    OpsAnswer::json(200, &body(&state.pool().devices(), watch.gpus()))
}

fn body(ledger: &[DeviceReport], gpus: Result<Vec<Gpu>, String>) -> Value {
    let of = |id: DeviceId| ledger.iter().find(|report| report.device == id);
    let mut devices = vec![with_ledger(cpu(), of(DeviceId::Cpu))];
    let mut n_gpus = 0;
    for gpu in gpus.iter().flatten() {
        devices.push(with_ledger(gpu_object(gpu), of(DeviceId::Cuda(gpu.index))));
        n_gpus += 1;
    }
    // What models of ours hold on GPUs that nvidia-smi does not list, or where there is none.
    let is_listed = |id: DeviceId| {
        let listed = gpus.iter().flatten();
        listed
            .map(|gpu| DeviceId::Cuda(gpu.index))
            .any(|gpu| gpu == id)
    };
    let on_gpus = ledger.iter().filter(|one| one.device != DeviceId::Cpu);
    for report in on_gpus.filter(|one| !is_listed(one.device)) {
        let device = json!({
            "device": report.device.to_string(), "kind": "gpu", "available": true,
            "name": null, "uuid": null, "driver": null, "total_bytes": null,
            "used_bytes": null, "utilization_percent": null,
        });
        devices.push(with_ledger(device, Some(report)));
    }
    let availability = match gpus {
        Ok(_) if n_gpus > 0 => json!({"available": true, "count": n_gpus}),
        Ok(_) => json!({"available": false, "reason": "the driver knows no GPU"}),
        Err(reason) => json!({"available": false, "reason": reason}),
    };
    json!({"object": "list", "data": devices, "gpus": availability})
}

fn cpu() -> Value {
    let id = DeviceId::Cpu.to_string();
    match main_memory() {
        Ok(memory) => json!({
            "device": id, "kind": "cpu", "available": true,
            "total_bytes": memory.total_bytes,
            "used_bytes": memory.used_bytes,
            "process_bytes": memory.process_bytes,
        }),
        Err(reason) => json!({
            "device": id, "kind": "cpu", "available": false, "reason": reason,
            "total_bytes": null, "used_bytes": null, "process_bytes": null,
        }),
    }
}

fn gpu_object(gpu: &Gpu) -> Value {
    json!({
        "device": DeviceId::Cuda(gpu.index).to_string(), "kind": "gpu", "available": true,
        "name": gpu.name, "uuid": gpu.uuid, "driver": gpu.driver,
        "total_bytes": gpu.total_bytes,
        "used_bytes": gpu.used_bytes,
        "utilization_percent": gpu.utilization_percent,
    })
}

/// Adds what models may hold there, what they hold, and which they are.
fn with_ledger(mut device: Value, report: Option<&DeviceReport>) -> Value {
    device["ledger"] = match report {
        None => Value::Null,
        Some(report) => json!({
            // null: nobody set one
            "limit_bytes": Some(report.limit_bytes).filter(|limit| *limit != u64::MAX),
            "used_bytes": report.used_bytes,
        }),
    };
    let shares = report.map_or(&[][..], |report| &report.models);
    device["models"] = shares.iter().map(share).collect();
    device
}

fn share(share: &DeviceShare) -> Value {
    json!({
        "model": share.model,
        "runtime_state": share.state.name(),
        "memory": models::memory(&share.memory),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::RuntimeState;
    use crate::pool::ledger::{MemorySource, ModelMemory};

    #[test]
    fn devices_with_and_without_gpus() {
        let memory = ModelMemory {
            device: DeviceId::Cpu,
            weight_bytes: 5,
            kv_bytes: 2,
            scratch_bytes: 1,
            source: MemorySource::MeasuredLoadDelta,
        };
        let ledger = [DeviceReport {
            device: DeviceId::Cpu,
            limit_bytes: 100,
            used_bytes: 8,
            models: vec![DeviceShare {
                model: "a".to_owned(),
                state: RuntimeState::Loaded,
                memory,
            }],
        }];
        let without = body(&ledger, Err("not available: no driver".to_owned()));
        assert_eq!(
            without["gpus"],
            json!({"available": false, "reason": "not available: no driver"})
        );
        let cpu = &without["data"][0];
        assert_eq!(cpu["ledger"], json!({"limit_bytes": 100, "used_bytes": 8}));
        assert_eq!(cpu["models"][0]["memory"]["estimate_bytes"], 8);
        assert_eq!(cpu["models"][0]["memory"]["source"], "measured load delta");
        let gpu = Gpu {
            index: 1,
            uuid: "GPU-1".to_owned(),
            name: "A".to_owned(),
            total_bytes: Some(9),
            used_bytes: None,
            utilization_percent: None,
            driver: "1".to_owned(),
        };
        let with = body(&ledger, Ok(vec![gpu]));
        assert_eq!(with["gpus"], json!({"available": true, "count": 1}));
        let gpu = &with["data"][1];
        assert_eq!(
            (&gpu["device"], &gpu["total_bytes"]),
            (&json!("cuda:1"), &json!(9))
        );
        assert_eq!((&gpu["ledger"], &gpu["models"]), (&Value::Null, &json!([])));
        assert_eq!(body(&ledger, Ok(Vec::new()))["gpus"]["available"], false);
    }
}
