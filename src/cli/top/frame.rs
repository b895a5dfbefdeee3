//! One frame of `tinyloop top`: text from two samples. Pure.

use super::sample::{Counts, Sample};
use crate::cli::admin_client::{bytes_text, table};
use crate::cli::models::{memory_text, note, replicas_text};
use serde_json::Value;
use std::time::Duration;

/// The whole screen. Without an earlier sample the rates are not known yet.
pub(super) fn frame(title: &str, before: Option<&Sample>, now: &Sample) -> String {
    let models: Vec<&Value> = now.models.as_array().into_iter().flatten().collect();
    let n_loaded = models.iter().filter(|model| model["is_loaded"] == true);
    let mut text = format!(
        "tinyloop top  {title}  {} of {} models loaded\n",
        n_loaded.count(),
        models.len()
    );
    for line in device_lines(&now.devices) {
        text.push_str(&line);
        text.push('\n');
    }
    text.push('\n');
    text.push_str(&model_table(&models, before, now));
    text
}

fn device_lines(devices: &Value) -> Vec<String> {
    let all = devices["data"].as_array().into_iter().flatten();
    let mut lines: Vec<String> = all.map(device_line).collect();
    if let Some(reason) = devices["gpus"]["reason"].as_str() {
        lines.push(format!("gpu: {reason}"));
    }
    lines
}

fn device_line(device: &Value) -> String {
    let bytes = |value: &Value| value.as_u64().map_or("?".to_owned(), bytes_text);
    let id = device["device"].as_str().unwrap_or("?");
    let name = device["name"].as_str();
    let mut line = match name {
        Some(name) => format!("{id} ({name}): "),
        None => format!("{id}: "),
    };
    let (used, total) = (bytes(&device["used_bytes"]), bytes(&device["total_bytes"]));
    line.push_str(&format!("{used} of {total} used"));
    if !device["process_bytes"].is_null() {
        line.push_str(&format!(
            ", this server {}",
            bytes(&device["process_bytes"])
        ));
    }
    let ledger = &device["ledger"];
    if !ledger.is_null() {
        let (used, limit) = (bytes(&ledger["used_bytes"]), bytes(&ledger["limit_bytes"]));
        line.push_str(&format!(", its models {used} of {limit}"));
    }
    if let Some(percent) = device["utilization_percent"].as_u64() {
        line.push_str(&format!(", {percent} % busy"));
    }
    line
}

fn model_table(models: &[&Value], before: Option<&Sample>, now: &Sample) -> String {
    let head = [
        "MODEL",
        "STATE",
        "REPLICAS",
        "QUEUE",
        "RUNNING",
        "TARGET",
        "TOK/S",
        "REQ/S",
        "REFUSED/S",
        "KV",
        "MEMORY",
        "NOTE",
    ];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    let mut sums = Sums::default();
    for model in models {
        let rates = rates(model, before, now);
        sums.add(model, rates);
        rows.push(model_row(model, rates, now));
    }
    if models.len() > 1 {
        rows.push(sums.row());
    }
    table(&rows, &[2, 3, 4, 5, 6, 7, 8, 9, 10])
}

/// Per second, over the time between both samples.
#[derive(Clone, Copy, Default)]
struct Rates {
    tokens: f64,
    ended: f64,
    refused: f64,
}

fn counts_of(model: &Value, sample: &Sample) -> Counts {
    let name = model["name"].as_str().unwrap_or_default();
    sample.counts.get(name).copied().unwrap_or_default()
}

/// None when there is no time between the samples.
fn rates(model: &Value, before: Option<&Sample>, now: &Sample) -> Option<Rates> {
    let before = before?;
    let time = now
        .at
        .checked_sub(before.at)
        .filter(|time| *time > Duration::ZERO)?;
    let (old, new) = (counts_of(model, before), counts_of(model, now));
    // Counters that fell belong to a server that was started again: all of it is new.
    let per_second = |old: f64, new: f64| {
        let more = if new < old { new } else { new - old };
        more / time.as_secs_f64()
    };
    Some(Rates {
        tokens: per_second(old.tokens, new.tokens),
        ended: per_second(old.ended, new.ended),
        refused: per_second(old.refused, new.refused),
    })
}

fn rate_text(rate: Option<f64>) -> String {
    rate.map_or("-".to_owned(), |rate| format!("{rate:.1}"))
}

fn model_row(model: &Value, rates: Option<Rates>, now: &Sample) -> Vec<String> {
    let number = |field: &str| model[field].as_u64().unwrap_or(0).to_string();
    let text = |field: &str| model[field].as_str().unwrap_or("-").to_owned();
    // Other programs do not tell how full their KV memory is.
    let kv_usage = counts_of(model, now).kv_usage;
    let kv = match (model["is_loaded"] == true, kv_usage) {
        (true, Some(usage)) => format!("{:.0} %", usage * 100.0),
        (_, _) => "-".to_owned(),
    };
    let queued = model["queue_depth"].as_u64().unwrap_or(0);
    let waiting = model["waiting_for_load"].as_u64().unwrap_or(0);
    vec![
        text("name"),
        text("runtime_state"),
        replicas_text(model),
        (queued + waiting).to_string(),
        number("runtime_inflight"),
        number("total_target_inflight"),
        rate_text(rates.map(|rates| rates.tokens)),
        rate_text(rates.map(|rates| rates.ended)),
        rate_text(rates.map(|rates| rates.refused)),
        kv,
        memory_text(model),
        note(model),
    ]
}

/// The last line.
#[derive(Default)]
struct Sums {
    queued: u64,
    running: u64,
    rates: Option<Rates>,
}

impl Sums {
    fn add(&mut self, model: &Value, rates: Option<Rates>) {
        let number = |field: &str| model[field].as_u64().unwrap_or(0);
        self.queued += number("queue_depth") + number("waiting_for_load");
        self.running += number("runtime_inflight");
        let Some(rates) = rates else { return };
        let sum = self.rates.get_or_insert_default();
        sum.tokens += rates.tokens;
        sum.ended += rates.ended;
        sum.refused += rates.refused;
    }

    fn row(&self) -> Vec<String> {
        let text = |text: &str| text.to_owned();
        vec![
            text("all"),
            text(""),
            text(""),
            self.queued.to_string(),
            self.running.to_string(),
            text(""),
            rate_text(self.rates.map(|rates| rates.tokens)),
            rate_text(self.rates.map(|rates| rates.ended)),
            rate_text(self.rates.map(|rates| rates.refused)),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::collections::BTreeMap;

    fn sample(at_ms: u64, tokens: f64) -> Sample {
        let counts = Counts {
            tokens,
            ended: tokens / 10.0,
            refused: 0.0,
            kv_usage: Some(0.125),
            kv_blocks: 8.0,
        };
        Sample {
            at: Duration::from_millis(at_ms),
            models: json!([
                {"name": "chat", "runtime_state": "loaded", "is_loaded": true, "replicas": 2,
                 "loaded_replicas": 1, "queue_depth": 3, "runtime_inflight": 16,
                 "waiting_for_load": 0, "total_target_inflight": 16,
                 "memory": {"estimate_bytes": 210 << 20, "source": "measured load delta",
                            "is_estimate": false}},
                {"name": "other", "runtime_state": "failed", "is_loaded": false, "replicas": 1,
                 "loaded_replicas": 0, "queue_depth": 0, "waiting_for_load": 2,
                 "last_error": "no such file"},
            ]),
            devices: json!({
                "data": [{"device": "cpu", "used_bytes": 3_u64 << 30, "total_bytes": 8_u64 << 30,
                          "process_bytes": 1 << 30,
                          "ledger": {"used_bytes": 210 << 20, "limit_bytes": 6_u64 << 30}},
                         {"device": "cuda:0", "name": "H", "used_bytes": 1024,
                          "total_bytes": null, "utilization_percent": 7}],
                "gpus": {"available": false, "reason": "not available: no driver"},
            }),
            counts: BTreeMap::from([("chat".to_owned(), counts)]),
        }
    }

    #[test]
    fn a_frame_is_made_of_two_samples() {
        let (before, now) = (sample(1000, 100.0), sample(3000, 340.0));
        let expected = "\
tinyloop top  http://h  1 of 2 models loaded
cpu: 3.0 GiB of 8.0 GiB used, this server 1.0 GiB, its models 210 MiB of 6.0 GiB
cuda:0 (H): 1.0 KiB of ? used, 7 % busy
gpu: not available: no driver

MODEL  STATE   REPLICAS  QUEUE  RUNNING  TARGET  TOK/S  REQ/S  REFUSED/S    KV   MEMORY  NOTE
chat   loaded       1/2      3       16      16  120.0   12.0        0.0  12 %  210 MiB
other  failed       0/1      2        0       0    0.0    0.0        0.0     -        -  no such file
all                          5       16          120.0   12.0        0.0
";
        assert_eq!(frame("http://h", Some(&before), &now), expected);
    }

    #[test]
    fn rates_need_time_and_survive_a_new_server() {
        let (before, now) = (sample(1000, 500.0), sample(2000, 80.0));
        let model = &now.models[0];
        let tokens = |before| rates(model, before, &now).map(|rates| rates.tokens);
        assert_eq!(tokens(None), None);
        assert_eq!(tokens(Some(&now)), None);
        assert_eq!(tokens(Some(&before)), Some(80.0));
        assert!(frame("t", None, &now).contains("     -"));
        let empty = frame("t", None, &Sample::default());
        assert!(
            empty.starts_with("tinyloop top  t  0 of 0 models loaded\n"),
            "{empty}"
        );
    }
}
