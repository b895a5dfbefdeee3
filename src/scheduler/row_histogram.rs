//! The histogram of rows per quantum, which runtimes count themselves.
//!
//! The counts are kept by the engines (one per quantum, without a lock) and only read at a scrape,
//! so this is a collector that shows what it was last given instead of a histogram that is fed.
//! Per model the counts never go back, also when the model is loaded again.

use crate::runtime::RowCounts;
use parking_lot::Mutex;
use prometheus::core::{Collector, Desc};
use prometheus::proto::{Bucket, Histogram, LabelPair, Metric, MetricFamily, MetricType};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// See the module doc. Clones share the counts.
#[derive(Clone)]
pub(crate) struct RowHistogram {
    desc: Desc,
    /// By model; guards plain numbers, held for a copy.
    counts: Arc<Mutex<BTreeMap<String, RowCounts>>>,
}

impl RowHistogram {
    /// An empty one. Err when the name is no metric name.
    pub(crate) fn new(name: &str, help: &str) -> prometheus::Result<Self> {
        let labels = vec!["model".to_owned()];
        Ok(Self {
            desc: Desc::new(name.to_owned(), help.to_owned(), labels, HashMap::new())?,
            counts: Arc::default(),
        })
    }

    /// Adds what a model's runtimes counted since the last time.
    pub(crate) fn add(&self, model: &str, more: &RowCounts) {
        let mut counts = self.counts.lock();
        let total = counts.entry(model.to_owned()).or_default();
        for (total, more) in total.buckets.iter_mut().zip(more.buckets) {
            *total += more;
        }
        total.n_rows += more.n_rows;
    }

    fn histogram(counts: &RowCounts) -> Histogram {
        let mut n_quanta = 0;
        let mut buckets = Vec::with_capacity(counts.buckets.len());
        for (index, &n) in counts.buckets.iter().enumerate() {
            n_quanta += n;
            if index + 1 == counts.buckets.len() {
                break; // without a bound: the encoder writes `+Inf` itself, and would write ours as `inf`
            }
            let mut bucket = Bucket::default();
            bucket.set_cumulative_count(n_quanta);
            bucket.set_upper_bound(f64::from(1_u32 << index));
            buckets.push(bucket);
        }
        let mut histogram = Histogram::default();
        histogram.set_bucket(buckets);
        histogram.set_sample_count(n_quanta);
        histogram.set_sample_sum(counts.n_rows as f64);
        histogram
    }
}

impl Collector for RowHistogram {
    fn desc(&self) -> Vec<&Desc> {
        vec![&self.desc]
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let counts = self.counts.lock().clone();
        let metric = |(model, counts): (String, RowCounts)| {
            let mut label = LabelPair::default();
            label.set_name("model".to_owned());
            label.set_value(model);
            let mut metric = Metric::from_label(vec![label]);
            metric.set_histogram(Self::histogram(&counts));
            metric
        };
        let mut family = MetricFamily::default();
        family.set_name(self.desc.fq_name.clone());
        family.set_help(self.desc.help.clone());
        family.set_field_type(MetricType::HISTOGRAM);
        family.set_metric(counts.into_iter().map(metric).collect());
        vec![family]
    }
}
