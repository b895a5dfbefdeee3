//! The words of one generation that cross threads: what is asked, what comes back, and the sink
//! through which it comes.
//!
//! Plain data, no thread, no lock. Made by the HTTP side, queued by the scheduler, run by a
//! runtime. The engine reads token ids only; text exists on the HTTP side and in remote runtimes.
//! What is *not* here: lifecycle state (`scheduler`), sequences (`engine`), JSON (`http`).

mod sampling;
mod upstream;

pub use sampling::{
    Dry, DynamicTemperature, ExtraSampling, Mirostat, MirostatVersion, SamplerStep, SamplingParams,
    Xtc,
};
pub use upstream::{
    TextLogprob, TextToken, UpstreamCall, UpstreamFault, UpstreamPart, UpstreamPrompt,
};

use crate::constraint::ConstraintSource;
use std::fmt;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A vocabulary index, `0..vocab_size`.
pub type TokenId = u32;

/// Identity of one generation: 96 random bits, shown as 24 hex characters.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId([u8; 12]);

impl RequestId {
    /// A fresh id. Unique within the process (a counter is mixed in), unguessable enough for a
    /// cancel route (the hasher keys are seeded by the operating system), not a secret.
    #[must_use]
    pub fn generate() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let count = NEXT.fetch_add(1, Ordering::Relaxed);
        let mut bytes = [0_u8; 12];
        bytes[..8].copy_from_slice(&random_u64(count).to_le_bytes());
        bytes[8..].copy_from_slice(&(count as u32).to_le_bytes());
        Self(bytes)
    }

    /// A part of it, for clients that know tasks by a number: different for 2^32 requests in a row.
    #[must_use]
    pub fn low_bits(self) -> u32 {
        let [.., a, b, c, d] = self.0;
        u32::from_le_bytes([a, b, c, d])
    }

    /// Reads the 24 hex characters that `Display` writes.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.as_bytes();
        if text.len() != 24 {
            return None;
        }
        let mut bytes = [0_u8; 12];
        for (byte, pair) in bytes.iter_mut().zip(text.chunks_exact(2)) {
            let high = (pair[0] as char).to_digit(16)?;
            let low = (pair[1] as char).to_digit(16)?;
            *byte = (high * 16 + low) as u8;
        }
        Some(Self(bytes))
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Written several times per request: digit by digit through the formatter it showed in profiles.
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let mut text = [0; 24];
        for (pair, byte) in text.chunks_exact_mut(2).zip(self.0) {
            pair[0] = DIGITS[usize::from(byte >> 4)];
            pair[1] = DIGITS[usize::from(byte & 15)];
        }
        f.write_str(std::str::from_utf8(&text).expect("hex digits are ASCII"))
    }
}

impl fmt::Debug for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RequestId({self})")
    }
}

/// Content address of a registered prefix, shown as 32 hex characters.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PrefixId(pub u128);

impl PrefixId {
    /// Reads the 32 hex characters that `Display` writes.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let is_hex = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let bits = is_hex.then(|| u128::from_str_radix(text, 16).ok())?;
        bits.map(Self)
    }
}

impl fmt::Display for PrefixId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for PrefixId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PrefixId({self})")
    }
}

/// The beginning of prompts to come, whose K/V a runtime shall keep.
#[derive(Clone, Debug)]
pub struct Prefix {
    /// Names it for `unpin`; the caller sees to it that different contents have different ids.
    pub id: PrefixId,
    /// Special ones included. Only whole blocks of them can be kept.
    pub tokens: Arc<[TokenId]>,
    /// As in [`GenerationRequest`].
    pub loops: Option<u32>,
    /// As in the requests that shall find it; all of the prefix is kept beside the window.
    pub cache_window: u32,
    /// As in [`GenerationRequest`].
    pub isolation_key: u64,
}

/// Why a runtime does not keep a prefix.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PinError {
    /// It has no prefix cache, or the cache is off.
    #[error("the model's runtime keeps no prefixes")]
    Unsupported,
    /// Not one whole block.
    #[error(
        "the prefix has {n_tokens} tokens; it is kept in whole blocks, so that at least \
         {block_tokens} are needed"
    )]
    TooShort {
        /// Tokens given.
        n_tokens: u32,
        /// Tokens of a block.
        block_tokens: u32,
    },
    /// It cannot run there at all; the text says why.
    #[error("{0}")]
    Refused(String),
    /// Pins would take too much of the KV memory from running requests.
    #[error(
        "the prefix needs {needed_pages} KV pages more, but registered prefixes hold \
         {pinned_pages} of the {pages_max} pages that they may use; remove some, or raise \
         kv_tokens of the engine"
    )]
    NoRoom {
        /// Pages that are not pinned yet.
        needed_pages: u32,
        /// Pages pinned already.
        pinned_pages: u32,
        /// Most pages that may be pinned.
        pages_max: u32,
    },
}

/// 64 bits that differ per call and per process; for ids and default seeds, not for secrets.
#[must_use]
pub fn random_u64(salt: u64) -> u64 {
    let mut hasher = RandomState::new().build_hasher();
    hasher.write_u64(salt);
    hasher.finish()
}

/// When a generation ends before `max_tokens`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StopRules {
    /// Text that ends the answer; matched on the consumer's side, where text exists.
    pub strings: Vec<String>,
    /// Token ids that end the answer, beside the model's own end-of-generation tokens.
    pub token_ids: Vec<TokenId>,
    /// The model's end-of-generation tokens are never sampled.
    pub ignore_eos: bool,
    /// No end-of-generation or stop token is sampled before this many tokens, and a stop string that is
    /// complete before is text.
    pub min_tokens: u32,
    /// Keep the matched stop string in the text.
    pub include_stop_string: bool,
}

/// What shows that a token has looped enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExitRule {
    /// The model's own gate (Ouro): enough once the probability to be done, summed over the loops
    /// so far, reaches the threshold. 0..=1; at 0 all leave after the first loop, at 1 none does.
    Gate,
    /// Enough once the next-token distribution is nearly that of the loop before: their
    /// Kullback-Leibler divergence in nats is below the threshold. From the second loop on.
    Kl,
    /// Enough once the state is nearly that of the loop before: the norm of their difference, in
    /// parts of the state's norm, is below the threshold. From the second loop on.
    Latent,
}

impl ExitRule {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Gate, Self::Kl, Self::Latent];

    /// Its name in requests and on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Gate => "gate",
            Self::Kl => "kl",
            Self::Latent => "latent",
        }
    }

    /// The rule of that name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|rule| rule.name() == name)
    }
}

/// Every token, of the prompt too, leaves the loop when a rule says that it has looped enough, at
/// the latest after the loops of the request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdaptiveExit {
    /// What is looked at.
    pub rule: ExitRule,
    /// See [`ExitRule`]; not negative. At 0 none leaves early by `Kl` and `Latent`.
    pub threshold: f32,
}

/// One generation as the scheduler and every runtime see it.
#[derive(Clone, Debug)]
pub struct GenerationRequest {
    /// Identity in logs, metrics, cancel routes.
    pub id: RequestId,
    /// Prompt tokens, special ones included; empty only with `upstream`.
    pub prompt: Arc<[TokenId]>,
    /// Most tokens to generate; 0 scores the prompt only.
    pub max_tokens: u32,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// When to stop.
    pub stop: StopRules,
    /// Some(n): report the log-probability of each generated token and of the n likeliest.
    pub logprobs: Option<u32>,
    /// Some(n): the same for every prompt token but the first. Disables prefix reuse.
    pub prompt_logprobs: Option<u32>,
    /// Loops asked of a looped model; None = the model's default.
    pub loops: Option<u32>,
    /// Fewest loops the request accepts, when that meets its latency objective; None = as asked.
    pub min_loops: Option<u32>,
    /// Leave the loop early where that changes little; None = always all loops.
    pub adaptive: Option<AdaptiveExit>,
    /// Sliding attention window in tokens: each token sees itself and those before it, so many
    /// together; 0 = full attention. With a window K/V older than that are not held.
    pub cache_window: u32,
    /// With a window: so many first tokens of the prompt stay visible beside it, and held. Whole
    /// blocks. 0 = the executor sets it when the request is submitted, to the longest prefix that
    /// is registered then with the same window, loops and isolation key and begins the prompt.
    /// From then on it belongs to the request, so that nothing depends on when or where it runs.
    pub kept_tokens: u32,
    /// What the answer must look like; None = anything. It says where the answer may end as well, so
    /// [`StopRules::min_tokens`] and [`StopRules::ignore_eos`] do not count beside it.
    pub constraint: Option<Arc<dyn ConstraintSource>>,
    /// Asks for one vector of the prompt's states ([`GenerationEvent::Embedding`]) instead of tokens;
    /// then `max_tokens` is 0, and no blocks are reused nor kept.
    pub embed: bool,
    /// Whether blocks computed by earlier requests may be reused.
    pub reuse_prefix: bool,
    /// Requests share cached prefixes only within one key (tenant isolation).
    pub isolation_key: u64,
    /// For runtimes without a tokenizer: what is asked, as text. Then `prompt` is empty, and
    /// `max_tokens` is `u32::MAX` where the client set no limit.
    pub upstream: Option<Arc<UpstreamCall>>,
}

impl GenerationRequest {
    /// A request for the embedding of a prompt.
    #[must_use]
    pub fn embedding(prompt: impl Into<Arc<[TokenId]>>) -> Self {
        Self {
            embed: true,
            ..Self::new(prompt, 0)
        }
    }

    /// A request with default sampling and stop rules.
    #[must_use]
    pub fn new(prompt: impl Into<Arc<[TokenId]>>, max_tokens: u32) -> Self {
        Self {
            id: RequestId::generate(),
            prompt: prompt.into(),
            max_tokens,
            sampling: SamplingParams::default(),
            stop: StopRules::default(),
            logprobs: None,
            prompt_logprobs: None,
            loops: None,
            min_loops: None,
            adaptive: None,
            cache_window: 0,
            kept_tokens: 0,
            constraint: None,
            embed: false,
            reuse_prefix: true,
            isolation_key: 0,
            upstream: None,
        }
    }

    /// Tokens of the prompt; a guess where another server will count them.
    #[must_use]
    pub fn prompt_tokens(&self) -> u32 {
        match &self.upstream {
            Some(call) => call.guessed_prompt_tokens(),
            None => u32::try_from(self.prompt.len()).unwrap_or(u32::MAX),
        }
    }

    /// The same once its runtime has counted: what another server told, when it told a number.
    #[must_use]
    pub fn counted_prompt_tokens(&self, told: &Usage) -> u32 {
        match (&self.upstream, told.prompt_tokens) {
            (Some(_), n_told @ 1..) => n_told,
            _ => self.prompt_tokens(),
        }
    }
}

/// Log-probability of a token where it stands, with the likeliest alternatives, best first.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    /// The token that was chosen (or stands in the prompt).
    pub token: TokenId,
    /// Natural log of its probability under the raw model distribution (before sampling cuts).
    pub logprob: f32,
    /// At most the asked number, by falling probability.
    pub top: Vec<(TokenId, f32)>,
}

/// Why a generation ended well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// End-of-generation token, stop token or stop string.
    Stop,
    /// `max_tokens` or the end of the context.
    Length,
}

/// Token counts of one generation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Prompt tokens whose KV came from the prefix cache.
    pub cached_tokens: u32,
    /// Generated tokens; a final end-of-generation token counts.
    pub completion_tokens: u32,
    /// Generated tokens that were thoughts, where another server counts them; else 0.
    pub reasoning_tokens: u32,
    /// Loops the request ran with (1 for ordinary models): granted, and with early exit the most.
    pub loops: u32,
    /// Tokens that went through the loop for this request, each once: prompt and generated ones, but
    /// not those from the cache. 0 where the runtime does not count them.
    pub loop_rows: u64,
    /// Loops that these tokens ran, together.
    pub loop_iterations: u64,
}

impl Usage {
    /// Loops that a token ran, on the average over those that were computed; `loops` where none was.
    #[must_use]
    pub fn mean_loops(&self) -> f64 {
        match self.loop_rows {
            0 => f64::from(self.loops),
            n_rows => self.loop_iterations as f64 / n_rows as f64,
        }
    }
}

/// What a runtime reports about one job, in this order: `PromptLogprobs`?, then `Token`/`Text`* or
/// `Embedding`, then exactly one of `Finished`, `Failed`.
#[derive(Clone, Debug)]
pub enum GenerationEvent {
    /// Log-probabilities of prompt tokens 1.. (asked by `prompt_logprobs`).
    PromptLogprobs(Vec<TokenLogprob>),
    /// The pooled states of the prompt, (d_model), not normalized (asked by `embed`). Of forwarded inputs
    /// one each, as their server made it.
    Embedding(Vec<f32>),
    /// One generated token (native runtimes). A final end-of-generation token is not sent.
    Token {
        /// The token.
        token: TokenId,
        /// Present when `logprobs` was asked.
        logprob: Option<TokenLogprob>,
        /// Counts so far, this token included: what holds if the answer ends here.
        usage: Usage,
    },
    /// Generated text without ids (remote runtimes).
    Text {
        /// What comes next; usually one token.
        text: String,
        /// Of the tokens whose text this is, when `logprobs` was asked.
        logprobs: Vec<TextLogprob>,
    },
    /// Something beside the text that another server has told apart.
    Part(UpstreamPart),
    /// The generation ended well.
    Finished {
        /// Why.
        reason: FinishReason,
        /// Final counts.
        usage: Usage,
    },
    /// The generation ended badly, or was cancelled.
    Failed(RequestError),
}

impl GenerationEvent {
    /// Whether it brings something of an answer that grows.
    #[must_use]
    pub fn is_generated(&self) -> bool {
        matches!(self, Self::Token { .. } | Self::Text { .. } | Self::Part(_))
    }
}

/// Why a request that was accepted did not finish.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// By the caller, a hang-up, a cancel route.
    #[error("the request was cancelled")]
    Cancelled,
    /// It waited in the queue beyond its deadline.
    #[error(
        "the request waited {waited_ms} ms in the queue, longer than its queue_timeout of \
         {queue_timeout_ms} ms"
    )]
    QueueTimeout {
        /// From submit until it was given up.
        waited_ms: u64,
        /// Its longest wait.
        queue_timeout_ms: u64,
    },
    /// The server drains.
    #[error("the server is shutting down")]
    ShuttingDown,
    /// The model is being unloaded.
    #[error("the model is being unloaded")]
    ModelUnloading,
    /// The runtime cannot do what was asked: the request's fault, and no retry helps.
    #[error("{0}")]
    Invalid(String),
    /// The prompt does not fit the context of the model, as the server says that counts its tokens.
    #[error("{0}")]
    ContextTooLong(String),
    /// Another server, to which the request was forwarded, did not answer it; the text is for the
    /// client and holds nothing of that server's words.
    #[error("{text}")]
    Upstream {
        /// In which way.
        fault: UpstreamFault,
        /// For the client.
        text: String,
    },
    /// Our bug; the text is for the client, details are in the log.
    #[error("the model runtime failed: {0}")]
    Fault(String),
    /// The replica that ran it died; another one may serve a retry. The text is for the
    /// operator: it may hold addresses, and the end of a child process's log.
    #[error("the replica that ran the request was lost: {0}")]
    ReplicaLost(String),
    /// Whoever runs it has no room for it now (an upstream's 429 or 503). Nothing is wrong with the
    /// replica nor with the request.
    #[error("the model's upstream is at capacity")]
    Overloaded {
        /// When the upstream says that a retry makes sense.
        retry_after_ms: Option<u64>,
    },
    /// No replica of the model came back in the time that a request may wait for one.
    #[error("no replica of the model is running; one is restarted as soon as that works")]
    NoReplica {
        /// When the next attempt to restart one is due.
        retry_after_ms: u64,
    },
}

/// The consumer is gone; the producer should stop and drop the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConsumerGone;

/// Where a runtime puts the events of one job. Called on the runtime's own thread; never blocks.
/// Dropping a sink before `Finished`/`Failed` reports a fault to whoever waits.
pub trait JobSink: Send {
    /// Delivers one event. `Err` means that nobody listens any more: treat it as a cancel.
    fn emit(&mut self, event: GenerationEvent) -> Result<(), ConsumerGone>;
}

/// One request on its way into a runtime.
pub struct Job {
    /// What to generate.
    pub request: Arc<GenerationRequest>,
    /// Where the events go.
    pub sink: Box<dyn JobSink>,
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job")
            .field("id", &self.request.id)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_parse_back_and_loops_have_a_mean() {
        for rule in ExitRule::ALL {
            assert_eq!(ExitRule::parse(rule.name()), Some(rule));
        }
        assert_eq!(ExitRule::parse("Gate"), None);
        let usage = Usage {
            loops: 4,
            ..Usage::default()
        };
        assert_eq!(usage.mean_loops(), 4.0);
        let counted = Usage {
            loop_rows: 8,
            loop_iterations: 20,
            ..usage
        };
        assert_eq!(counted.mean_loops(), 2.5);
    }

    #[test]
    fn ids_are_hex_characters_and_parse_back() {
        let id = RequestId::generate();
        assert_eq!(id.to_string().len(), 24);
        assert_eq!(RequestId::parse(&id.to_string()), Some(id));
        assert_eq!(RequestId::parse("xyz"), None);
        let prefix = PrefixId(0xfe << 64);
        assert_eq!(prefix.to_string().len(), 32);
        assert_eq!(PrefixId::parse(&prefix.to_string()), Some(prefix));
        for bad in [
            "",
            "+fe",
            "000000000000000fe0000000000000000",
            "+0000000000000fe0000000000000000",
        ] {
            assert_eq!(PrefixId::parse(bad), None, "{bad}");
        }
        assert_ne!(RequestId::generate(), RequestId::generate());
    }
}
