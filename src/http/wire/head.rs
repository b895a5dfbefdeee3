//! Renders response heads, and their `Date`. Pure except for the clock that `Date` reads; any thread.
//!
//! The wire owns the fields that frame a message; a handler that sets one of them, or a value with a
//! control character, gets an error instead of a head (a client's bytes echoed into a header could
//! otherwise start a second response).

use std::cell::Cell;
use std::io::{self, Write};
use std::time::{SystemTime, UNIX_EPOCH};

/// Fields that only the wire sets.
const OWN_FIELDS: [&str; 5] = [
    "content-length",
    "transfer-encoding",
    "connection",
    "keep-alive",
    "date",
];

/// How the response ends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Ending {
    /// After so many bytes.
    Length(usize),
    /// With the last chunk; on HTTP/1.0 with the connection.
    Stream,
}

/// The version and the fate of the connection.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Framing {
    pub(super) http11: bool,
    pub(super) keep: bool,
}

/// A response head with its empty line.
pub(super) fn render(
    status: u16,
    fields: &[(&str, &str)],
    framing: Framing,
    ending: Ending,
) -> io::Result<Vec<u8>> {
    let mut out = Vec::with_capacity(512);
    write!(out, "HTTP/1.1 {status} {}\r\n", reason(status))?;
    for (name, value) in fields {
        check_field(name, value)?;
        write!(out, "{name}: {value}\r\n")?;
    }
    out.extend_from_slice(b"Date: ");
    out.extend_from_slice(&date_now());
    out.extend_from_slice(b"\r\n");
    match ending {
        Ending::Length(_) if !has_body(status) => {}
        Ending::Length(n_bytes) => write!(out, "Content-Length: {n_bytes}\r\n")?,
        Ending::Stream if framing.http11 => {
            out.extend_from_slice(b"Transfer-Encoding: chunked\r\n")
        }
        Ending::Stream => {}
    }
    match (framing.keep, framing.http11) {
        (false, _) => out.extend_from_slice(b"Connection: close\r\n"),
        (true, false) => out.extend_from_slice(b"Connection: keep-alive\r\n"),
        (true, true) => {}
    }
    out.extend_from_slice(b"\r\n");
    Ok(out)
}

/// 204 and 304 never have a body, nor a length.
pub(super) fn has_body(status: u16) -> bool {
    !matches!(status, 100..200 | 204 | 304)
}

fn check_field(name: &str, value: &str) -> io::Result<()> {
    let token = |b: u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b);
    let problem = if name.is_empty() || !name.bytes().all(token) {
        "is not a header name"
    } else if value.bytes().any(|b| b.is_ascii_control() && b != b'\t') {
        "has a control character in its value"
    } else if OWN_FIELDS.iter().any(|own| own.eq_ignore_ascii_case(name)) {
        "is set by the connection layer only"
    } else {
        return Ok(());
    };
    Err(io::Error::new(
        io::ErrorKind::InvalidInput,
        format!("response header {name:?} {problem}"),
    ))
}

/// The reason phrase; empty for a status that nobody here sends.
fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        201 => "Created",
        202 => "Accepted",
        204 => "No Content",
        301 => "Moved Permanently",
        302 => "Found",
        304 => "Not Modified",
        307 => "Temporary Redirect",
        308 => "Permanent Redirect",
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        406 => "Not Acceptable",
        408 => "Request Timeout",
        409 => "Conflict",
        413 => "Content Too Large",
        415 => "Unsupported Media Type",
        417 => "Expectation Failed",
        422 => "Unprocessable Content",
        429 => "Too Many Requests",
        431 => "Request Header Fields Too Large",
        499 => "Client Closed Request",
        500 => "Internal Server Error",
        501 => "Not Implemented",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        504 => "Gateway Timeout",
        505 => "HTTP Version Not Supported",
        _ => "",
    }
}

/// `Date` of this second, rendered once per second and thread.
fn date_now() -> [u8; 29] {
    thread_local!(static CACHED: Cell<(u64, [u8; 29])> = const { Cell::new((u64::MAX, [0; 29])) });
    let now_s = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    CACHED.with(|cached| {
        let (at_s, text) = cached.get();
        if at_s == now_s {
            return text;
        }
        let text = http_date(now_s);
        cached.set((now_s, text));
        text
    })
}

/// IMF-fixdate of a Unix time, as RFC 9110 wants it: `Sun, 06 Nov 1994 08:49:37 GMT`.
fn http_date(unix_s: u64) -> [u8; 29] {
    const DAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];
    const MONTHS: [&str; 12] = [
        "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec",
    ];
    let (days, second) = (unix_s / 86_400, unix_s % 86_400);
    let (year, month, day) = civil_date(days);
    let mut text = [b' '; 29];
    // Every part has a fixed width until the year 10000, when the text is cut instead of overflowing.
    let _ = write!(
        &mut text[..],
        "{}, {day:02} {} {year:04} {:02}:{:02}:{:02} GMT",
        DAYS[(days % 7) as usize],
        MONTHS[month as usize % 12],
        second / 3600,
        second / 60 % 60,
        second % 60,
    );
    text
}

/// Year, month from 0 and day from 1 of a day count since 1970-01-01 in the Gregorian calendar. Counts
/// in years that begin in March, so that the leap day is the last of its year.
fn civil_date(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468; // since 0000-03-01
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let leap_days = day_of_era / 1460 - day_of_era / 36_524 + day_of_era / 146_096;
    let year_of_era = (day_of_era - leap_days) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * march_month + 2) / 5 + 1;
    let month = (march_month + 2) % 12;
    (era * 400 + year_of_era + u64::from(month < 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(status: u16, fields: &[(&str, &str)], framing: Framing, ending: Ending) -> String {
        let head = render(status, fields, framing, ending).expect("clean fields");
        let text = String::from_utf8(head).expect("ASCII");
        let date = text
            .lines()
            .find(|l| l.starts_with("Date: "))
            .expect("every response is dated");
        text.replace(&format!("{date}\r\n"), "")
    }

    #[test]
    fn heads() {
        let keep11 = Framing {
            http11: true,
            keep: true,
        };
        let close11 = Framing {
            keep: false,
            ..keep11
        };
        let keep10 = Framing {
            http11: false,
            ..keep11
        };
        let length = Ending::Length(3);
        assert_eq!(
            text(200, &[("a", "b")], keep11, length),
            "HTTP/1.1 200 OK\r\na: b\r\nContent-Length: 3\r\n\r\n"
        );
        assert_eq!(
            text(204, &[], keep11, Ending::Length(0)),
            "HTTP/1.1 204 No Content\r\n\r\n"
        );
        assert!(
            text(200, &[], close11, Ending::Stream)
                .ends_with("Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
        );
        assert!(text(200, &[], keep10, length).contains("Connection: keep-alive\r\n"));
        assert!(!text(200, &[], keep10, Ending::Stream).contains("chunked"));
    }

    #[test]
    fn fields_that_could_break_the_framing_are_errors() {
        for (name, value) in [
            ("a", "b\r\nc: d"),
            ("a", "b\nc"),
            ("a", "\0"),
            ("a\r\n", "b"),
            ("a b", "c"),
            ("", "b"),
            ("Content-Length", "3"),
        ] {
            let head = render(
                200,
                &[(name, value)],
                Framing {
                    http11: true,
                    keep: true,
                },
                Ending::Length(0),
            );
            assert_eq!(
                head.expect_err("refused").kind(),
                io::ErrorKind::InvalidInput,
                "{name:?} {value:?}"
            );
        }
    }

    #[test]
    fn dates() {
        for (unix_s, want) in [
            (0, "Thu, 01 Jan 1970 00:00:00 GMT"),
            (784_111_777, "Sun, 06 Nov 1994 08:49:37 GMT"),
            (951_782_400, "Tue, 29 Feb 2000 00:00:00 GMT"),
            (1_709_251_199, "Thu, 29 Feb 2024 23:59:59 GMT"),
            (4_107_542_400, "Mon, 01 Mar 2100 00:00:00 GMT"),
            (1_767_225_599, "Wed, 31 Dec 2025 23:59:59 GMT"),
        ] {
            assert_eq!(String::from_utf8_lossy(&http_date(unix_s)), want);
        }
    }
}
