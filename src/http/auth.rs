//! API keys of the data plane and the admin key of the management plane.
//!
//! A key comes as `Authorization: Bearer KEY` or `x-api-key: KEY`. Only hashes are held: a key of the
//! configuration is hashed when it is read, or stands there hashed already (`sha256:HEX`), and what a
//! request brings is hashed before it is compared, with all keys and in the same time wherever they
//! differ. Keys have 256 random bits (`tinyloop key new`), so a hash without a salt tells nothing.
//! A set of keys never changes; the data plane's is replaced whole when the configuration is read again.
//! What is not here: which routes ask for one (`router`), what its client may do (`access`).

use super::access::{Access, Client};
use super::errors::{ApiError, ErrorCode};
use super::wire::Request;
use crate::config::{Config, ConfigError, KeyConfig};
use ring::digest;
use ring::rand::{SecureRandom, SystemRandom};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Before the digits of a hashed key.
const HASHED: &str = "sha256:";

type Hash = [u8; digest::SHA256_OUTPUT_LEN];

/// Keys that open a plane; none = everything is open.
#[derive(Clone, Default)]
pub struct Keys {
    keys: Vec<(Hash, Arc<Client>)>,
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Keys({} keys)", self.keys.len()) // not even their hashes
    }
}

impl Keys {
    /// One key, or none: that of the management plane.
    ///
    /// # Errors
    /// It begins like a hash and is none.
    pub fn one(name: &str, key: Option<&str>) -> Result<Self, ConfigError> {
        let key = key.filter(|key| !key.is_empty());
        let config = key.map(|key| KeyConfig::new(name, key));
        Self::from_clients(config.as_slice(), &Self::default())
    }

    /// All keys of the data plane: `[keys]`, `server.api_keys`, and the lines of the key file. Clients
    /// that were there before keep what is left of their limits.
    ///
    /// # Errors
    /// A file or a variable that cannot be read, a hash that is none, a name or a key twice.
    pub fn of_data_plane(config: &Config, before: &Self) -> Result<Self, ConfigError> {
        let server = &config.server;
        let mut clients: Vec<KeyConfig> = Vec::new();
        let given = server.api_keys.iter().filter(|key| !key.is_empty());
        let mut lines: Vec<(Option<String>, String)> =
            given.map(|key| (None, key.clone())).collect();
        if let Some(path) = &server.api_key_file {
            lines.extend(read_file(path)?);
        }
        for ((name, key), place) in lines.into_iter().zip(1..) {
            let name = name.unwrap_or_else(|| format!("key-{place}"));
            clients.push(KeyConfig::new(name, key));
        }
        for client in &config.keys {
            clients.push(with_variable(client)?);
        }
        Self::from_clients(&clients, before)
    }

    fn from_clients(clients: &[KeyConfig], before: &Self) -> Result<Self, ConfigError> {
        let now = Instant::now();
        let mut keys: Vec<(Hash, Arc<Client>)> = Vec::with_capacity(clients.len());
        for config in clients {
            let name = config.name.as_str();
            let fault = |what: String| Err(ConfigError(format!("keys.{name}: {what}")));
            let hash = match stored_hash(&config.key) {
                Ok(hash) => hash,
                Err(what) => return fault(what),
            };
            for (other_hash, other) in &keys {
                if &**other.name() == name {
                    return fault("two keys have this name".to_owned());
                }
                if *other_hash == hash {
                    return fault(format!("its key is that of {} as well", other.name()));
                }
            }
            let known = before.keys.iter().find(|(_, old)| &**old.name() == name);
            let client = Client::new(config, known.map(|(_, old)| &**old), now);
            keys.push((hash, Arc::new(client)));
        }
        Ok(Self { keys })
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Whether there is none, and with it no question.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Whether a key is asked for at all.
    #[must_use]
    pub fn are_asked(&self) -> bool {
        !self.keys.is_empty()
    }

    /// Checks the headers of a request.
    ///
    /// # Errors
    /// As [`Self::check`], and 400 where a header with a key comes twice: a proxy may have looked at
    /// the other one.
    pub fn check_request(&self, request: &Request) -> Result<Access, ApiError> {
        let one = |name: &str| {
            let mut values = request.all(name);
            let first = values.next();
            match values.next() {
                Some(_) if self.are_asked() => Err(ambiguous(&format!("'{name}' comes twice"))),
                _ => Ok(first),
            }
        };
        self.check(one("authorization")?, one("x-api-key")?)
    }

    /// Checks the headers that may hold a key.
    ///
    /// # Errors
    /// 401: a key is asked, and there is none or an unknown one. 400: two different ones are given.
    pub fn check(
        &self,
        authorization: Option<&[u8]>,
        x_api_key: Option<&[u8]>,
    ) -> Result<Access, ApiError> {
        if self.keys.is_empty() {
            return Ok(Access::default());
        }
        let bearer = authorization.and_then(bearer);
        if let (Some(one), Some(other)) = (bearer, x_api_key)
            && one != other.trim_ascii()
        {
            return Err(ambiguous(
                "'Authorization' and 'x-api-key' hold different keys",
            ));
        }
        let Some(given) = bearer.or(x_api_key) else {
            return Err(ApiError::new(
                ErrorCode::InvalidApiKey,
                "an API key is needed: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
            ));
        };
        let given = hash_of(given);
        let mut known = None;
        for (hash, client) in &self.keys {
            let is_same = same(hash, &given); // every key is looked at
            known = if is_same { Some(client) } else { known };
        }
        match known {
            Some(client) => Ok(Access::of(Arc::clone(client))),
            None => Err(ApiError::new(
                ErrorCode::InvalidApiKey,
                "the API key is not known",
            )),
        }
    }
}

fn ambiguous(what: &str) -> ApiError {
    let message = format!("{what}; send one key, once");
    ApiError::new(ErrorCode::BadRequest, message)
}

/// A fresh key: 256 random bits.
///
/// # Errors
/// The system gives no random numbers.
pub fn new_key() -> Result<String, String> {
    let mut bytes = [0; 32];
    let filled = SystemRandom::new().fill(&mut bytes);
    filled.map_err(|_| "the system gives no random numbers".to_owned())?;
    Ok(format!("tl-{}", hex(&bytes)))
}

/// How a key stands in a file: `sha256:` and its hash.
#[must_use]
pub fn hashed(key: &str) -> String {
    format!("{HASHED}{}", hex(&hash_of(key.as_bytes())))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn hash_of(key: &[u8]) -> Hash {
    let digest = digest::digest(&digest::SHA256, key);
    digest.as_ref().try_into().expect("SHA-256 has 32 bytes")
}

/// The hash of a key as it is configured, plain or hashed.
fn stored_hash(text: &str) -> Result<Hash, String> {
    let Some(digits) = text.strip_prefix(HASHED) else {
        return Ok(hash_of(text.as_bytes()));
    };
    let what = || format!("'{HASHED}' is followed by the 64 hexadecimal digits of a hash");
    if digits.len() != 64 || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return Err(what());
    }
    let mut hash = [0; digest::SHA256_OUTPUT_LEN];
    for (byte, place) in hash.iter_mut().zip((0..).step_by(2)) {
        *byte = u8::from_str_radix(&digits[place..place + 2], 16).map_err(|_| what())?;
    }
    Ok(hash)
}

/// One key per line, `KEY` or `NAME KEY`; blank lines and `#` comments are skipped.
fn read_file(path: &Path) -> Result<Vec<(Option<String>, String)>, ConfigError> {
    let fault = |what: String| ConfigError(format!("{}: {what}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| fault(error.to_string()))?;
    let mut keys = Vec::new();
    for (line, number) in text.lines().map(str::trim).zip(1..) {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let mut words = line.split_whitespace();
        match (words.next(), words.next(), words.next()) {
            (Some(key), None, _) => keys.push((None, key.to_owned())),
            (Some(name), Some(key), None) => keys.push((Some(name.to_owned()), key.to_owned())),
            _ => {
                let what = format!("line {number} is neither a key nor a name and a key");
                return Err(fault(what));
            }
        }
    }
    match keys.is_empty() {
        // Going on would leave the server open although keys were wanted.
        true => Err(fault("holds no key".to_owned())),
        false => Ok(keys),
    }
}

/// With the key that its variable holds.
fn with_variable(config: &KeyConfig) -> Result<KeyConfig, ConfigError> {
    let Some(variable) = &config.key_env else {
        return Ok(config.clone());
    };
    let key = std::env::var(variable).unwrap_or_default();
    match key.is_empty() {
        true => Err(ConfigError(format!(
            "keys.{}: the environment variable {variable} of `key_env` is not set",
            config.name
        ))),
        false => Ok(KeyConfig {
            key,
            ..config.clone()
        }),
    }
}

/// The token of `Bearer TOKEN`, whose scheme may be in any case.
fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = value.split_at_checked(7)?;
    scheme
        .eq_ignore_ascii_case(b"bearer ")
        .then(|| token.trim_ascii())
}

/// Equality without an early exit.
fn same(a: &Hash, b: &Hash) -> bool {
    let differing = a.iter().zip(b).fold(0_u8, |bits, (x, y)| bits | (x ^ y));
    std::hint::black_box(differing) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(plain: &[&str], clients: Vec<KeyConfig>) -> Result<Keys, ConfigError> {
        let mut config = Config::default();
        config.server.api_keys = plain.iter().map(|key| (*key).to_owned()).collect();
        config.keys = clients;
        Keys::of_data_plane(&config, &Keys::default())
    }

    fn name_of(keys: &Keys, authorization: &[u8]) -> String {
        let access = keys.check(Some(authorization), None).expect("known");
        access.name().expect("keys are asked").to_string()
    }

    #[test]
    fn keys_are_checked_in_both_headers() {
        let mut alice = KeyConfig::new("alice", "hers");
        alice.limits.max_priority = 5;
        let keys = keys(&["secret", "", "other"], vec![alice]).expect("sound");
        assert_eq!(name_of(&keys, b"Bearer secret"), "key-1");
        assert_eq!(name_of(&keys, b"bearer  other "), "key-2");
        let alice = keys.check(None, Some(b"hers")).expect("known");
        assert_eq!(alice.max_priority(), 5);
        for (authorization, x_api_key) in [
            (None, None),
            (Some(b"Bearer secre".as_slice()), None),
            (Some(b"Bearer secret2".as_slice()), None),
            (Some(b"Basic secret".as_slice()), None),
            (Some(b"Bearer ".as_slice()), None),
            (None, Some(b"".as_slice())),
        ] {
            let error = keys.check(authorization, x_api_key).unwrap_err();
            assert_eq!(error.status(), 401);
        }
        let both = keys.check(Some(b"Bearer secret"), Some(b"secret"));
        assert!(both.is_ok(), "the same key twice is no doubt");
        let differing = keys.check(Some(b"Bearer secret"), Some(b"other"));
        assert_eq!(differing.unwrap_err().status(), 400);
        assert!(Keys::default().check(None, None).is_ok());
        assert!(!format!("{keys:?}").contains("secret"));
    }

    #[test]
    fn hashed_keys_open_to_their_secret_only() {
        let secret = new_key().expect("there is randomness");
        assert!(secret.len() == 3 + 64 && secret != new_key().expect("again"));
        let hash = hashed(&secret);
        let keys = keys(&[], vec![KeyConfig::new("a", hash.clone())]).expect("sound");
        assert_eq!(name_of(&keys, format!("Bearer {secret}").as_bytes()), "a");
        let by_hash = keys.check(Some(format!("Bearer {hash}").as_bytes()), None);
        assert_eq!(
            by_hash.unwrap_err().status(),
            401,
            "a stolen file opens nothing"
        );
        // The vector of FIPS 180-2.
        assert_eq!(
            hashed("abc"),
            "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }

    #[test]
    fn faulty_keys_are_named() {
        let key = |name: &str, key: &str| KeyConfig::new(name, key);
        let mut by_variable = key("v", "");
        by_variable.key_env = Some("TINYLOOP_TEST_NO_SUCH_VARIABLE".to_owned());
        for (clients, fault) in [
            (vec![key("a", "sha256:12")], "64 hexadecimal digits"),
            (
                vec![key("a", &format!("sha256:{}", "é".repeat(32)))],
                "64 hexadecimal",
            ),
            (
                vec![key("a", "x"), key("b", &hashed("x"))],
                "that of a as well",
            ),
            (vec![key("key-1", "y")], "two keys have this name"),
            (vec![by_variable], "TINYLOOP_TEST_NO_SUCH_VARIABLE"),
        ] {
            let error = keys(&["plain"], clients).unwrap_err();
            assert!(error.0.contains(fault), "{error}");
        }
    }

    #[test]
    fn a_key_file_has_keys_and_names() {
        let path = std::env::temp_dir().join(format!("tinyloop-keys-{}", std::process::id()));
        std::fs::write(&path, "# ours\n\nalone\nalice hers\n").expect("written");
        let mut config = Config::default();
        config.server.api_key_file = Some(path.clone());
        let found = Keys::of_data_plane(&config, &Keys::default()).expect("sound");
        assert_eq!(name_of(&found, b"Bearer alone"), "key-1");
        assert_eq!(name_of(&found, b"Bearer hers"), "alice");
        for (text, fault) in [("# none\n", "holds no key"), ("a b c\n", "line 1")] {
            std::fs::write(&path, text).expect("written");
            let error = Keys::of_data_plane(&config, &Keys::default()).unwrap_err();
            assert!(error.0.contains(fault), "{error}");
        }
        std::fs::remove_file(&path).expect("removed");
        assert!(Keys::of_data_plane(&config, &Keys::default()).is_err());
    }

    #[test]
    fn a_reload_keeps_what_is_left_of_unchanged_limits() {
        let mut config = KeyConfig::new("a", "k");
        config.limits.requests_per_minute = Some(1);
        let first = keys(&[], vec![config.clone()]).expect("sound");
        let quota = |keys: &Keys| {
            let access = keys.check(None, Some(b"k")).expect("known");
            Arc::clone(access.quota().expect("limited"))
        };
        quota(&first).count_request(Instant::now()).expect("one");
        let again = Keys::from_clients(&[config.clone()], &first).expect("sound");
        assert!(quota(&again).count_request(Instant::now()).is_err());
        config.limits.requests_per_minute = Some(2);
        let more = Keys::from_clients(&[config], &first).expect("sound");
        assert!(quota(&more).count_request(Instant::now()).is_ok());
    }
}
