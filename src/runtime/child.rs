//! A process of ours that serves a model: started, watched, stopped, never left behind.
//!
//! Three guards against orphans, none of which needs `unsafe`:
//!
//! * The child lives in a process group of its own, so that everything it starts is stopped with it.
//! * The group's leader is a *watcher*: a shell that waits for the end of a pipe whose other end is
//!   held here. However this process ends, SIGKILL included, the kernel closes the pipe, and the
//!   watcher kills its whole group. It is there before the child is, so there is no gap. (The
//!   parent-death signal of Linux would reach the child alone, not what it started, and it fires when
//!   the *thread* that started the child ends.)
//! * When the child ends by itself, the rest of the group is killed too.
//!
//! Whoever kills the watcher itself takes the second guard away. That is noticed at the other end of a
//! second pipe, which only the watcher holds: the group is killed, which ends the child like any crash, and
//! the one that is started in its place has a watcher again.
//!
//! ```text
//!   start ─► Running ── the process ends ─► Ended(why)
//!               └─ stop: SIGTERM to the group, SIGKILL after stop_timeout ─┘
//! ```
//!
//! Three threads belong to a child: `child-NAME` waits for its end, `guard-NAME` for the watcher's, `log-NAME`
//! reads what it writes, line by line, into the log (level debug) and a short memory for error messages. What is not here:
//! what it is asked (`upstream`), and that it is started again (the scheduler's replica factory).

use super::resident;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::io::{BufRead, BufReader, PipeReader, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child as Process, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Kills its own process group when the other end of its standard input is closed.
const WATCHER: &str = "trap '' TERM INT HUP; read -r _; kill -KILL 0";
/// Log lines that are remembered.
const LINES_KEPT: usize = 200;
/// Log lines that an error tells.
const LINES_TOLD: usize = 5;
/// Bytes of a line that are kept.
const LINE_BYTES_MAX: u64 = 2000;
/// How long the log may lag behind the end of the process.
const LOG_GRACE: Duration = Duration::from_secs(1);
/// How often a starting child is asked whether it is ready.
const READY_POLL: Duration = Duration::from_millis(50);

/// What to start.
#[derive(Clone, Debug)]
pub struct ChildSpec {
    /// In thread names and logs.
    pub name: String,
    /// A path, or a name to look up in `PATH`.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<String>,
    /// Put before `LD_LIBRARY_PATH`.
    pub library_path: Option<PathBuf>,
    /// From SIGTERM to SIGKILL.
    pub stop_timeout: Duration,
}

/// Called once with the reason.
type OnExit = Box<dyn FnOnce(&str) + Send>;

#[derive(Default)]
struct State {
    /// Why it ended; None = it runs.
    ended: Option<String>,
    /// It is being stopped: its end is no accident.
    is_stopping: bool,
    /// The group's leader was reaped: its number may be another group's by now.
    is_reaped: bool,
    /// The watcher ended before the child did.
    lost_guard: bool,
    log_ended: bool,
    /// The latest lines, oldest first.
    lines: VecDeque<String>,
    on_exit: Option<OnExit>,
}

struct Shared {
    name: String,
    pid: u32,
    group: Pid,
    /// Guards the end. Signals are sent under it, and the group's leader is reaped under it, so that
    /// no signal goes to a group that is not ours any more.
    state: Mutex<State>,
    changed: Condvar,
}

/// See the module. Dropping it stops the process.
pub struct Child {
    shared: Arc<Shared>,
    stop_timeout: Duration,
    /// Joined by `stop`.
    waiter: Mutex<Option<JoinHandle<()>>>,
}

/// The group's leader and our end of its pipe.
struct Watcher {
    process: Process,
    /// Held open for as long as the child may live.
    _pipe: Option<ChildStdin>,
    /// Ends with it: nothing is ever written there. Taken by `guard-NAME`.
    life: Option<ChildStdout>,
}

impl Watcher {
    fn start() -> Result<Self, String> {
        let mut process = Command::new("/bin/sh")
            .args(["-c", WATCHER])
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| format!("/bin/sh, which guards child processes: {error}"))?;
        let pipe = process.stdin.take();
        let life = process.stdout.take();
        Ok(Self {
            process,
            _pipe: pipe,
            life,
        })
    }

    fn group(&self) -> Pid {
        Pid::from_raw(self.process.id().cast_signed())
    }

    /// Kills the group and reaps its leader.
    fn kill(&mut self) {
        let _ = killpg(self.group(), Signal::SIGKILL); // it may be empty but for the leader
        let _ = self.process.wait();
    }
}

impl Child {
    /// Starts it.
    ///
    /// # Errors
    /// The program cannot be run, in words; nothing is left.
    pub fn start(spec: &ChildSpec) -> Result<Self, String> {
        let mut watcher = Watcher::start()?;
        let started = spawn(spec, watcher.group());
        let (process, log) = started.inspect_err(|_| watcher.kill())?;
        let shared = Arc::new(Shared {
            name: spec.name.clone(),
            pid: process.id(),
            group: watcher.group(),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        tracing::info!(name = %spec.name, pid = process.id(), program = %spec.program.display(),
            "child process started");
        match shared.start_threads(process, log, watcher) {
            Ok(waiter) => Ok(Self {
                shared,
                stop_timeout: spec.stop_timeout,
                waiter: Mutex::new(Some(waiter)),
            }),
            // The closure was dropped, and with it the pipe: the watcher kills the group.
            Err(error) => Err(format!("no thread for the child process: {error}")),
        }
    }

    /// Process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.shared.pid
    }

    /// Bytes of main memory that it and what it started hold now; None where the system does not tell.
    #[must_use]
    pub fn resident_bytes(&self) -> Option<u64> {
        resident::group_bytes(self.shared.group.as_raw().cast_unsigned())
    }

    /// Calls `report` with the reason when the process ends without being told to; at once if it has.
    pub fn on_exit(&self, report: impl FnOnce(&str) + Send + 'static) {
        let ended = {
            let mut state = self.shared.state.lock();
            match &state.ended {
                Some(why) => why.clone(),
                None => {
                    state.on_exit = Some(Box::new(report));
                    return;
                }
            }
        };
        report(&ended);
    }

    /// Waits until `is_ready` says yes, asking again and again.
    ///
    /// # Errors
    /// It ended, or the time is over; with the end of its log. The caller drops it.
    pub fn wait_ready(
        &self,
        timeout: Duration,
        mut is_ready: impl FnMut() -> bool,
    ) -> Result<(), String> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(why) = &self.shared.state.lock().ended {
                return Err(why.clone());
            }
            if is_ready() {
                return Ok(());
            }
            if Instant::now() >= deadline {
                let seconds = timeout.as_secs_f64();
                let log = self.shared.state.lock().log_end();
                return Err(format!("it was not ready after {seconds} s{log}"));
            }
            self.shared.wait_ended(READY_POLL);
        }
    }

    /// The latest lines of its log, oldest first.
    #[must_use]
    pub fn log(&self) -> Vec<String> {
        self.shared.state.lock().lines.iter().cloned().collect()
    }

    /// Stops it: SIGTERM to its group, SIGKILL when it takes too long. Idempotent; waits.
    pub fn stop(&self) {
        let is_running = {
            let mut state = self.shared.state.lock();
            state.is_stopping = true;
            state.on_exit = None;
            if !state.is_reaped {
                let _ = killpg(self.shared.group, Signal::SIGTERM); // the leader ignores it
            }
            state.ended.is_none()
        };
        if is_running && !self.shared.wait_ended(self.stop_timeout) {
            let state = self.shared.state.lock();
            if !state.is_reaped {
                tracing::warn!(name = %self.shared.name, "child process ignores SIGTERM: killed");
                let _ = killpg(self.shared.group, Signal::SIGKILL);
            }
        }
        let waiter = self.waiter.lock().take();
        if let Some(waiter) = waiter {
            let _ = waiter.join(); // it cannot panic
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.stop();
    }
}

fn thread(name: String, body: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name).spawn(body)
}

/// The process, in the watcher's group, and what it writes.
fn spawn(spec: &ChildSpec, group: Pid) -> Result<(Process, PipeReader), String> {
    let fault = |error: std::io::Error| format!("{}: {error}", spec.program.display());
    let (log, writer) = std::io::pipe().map_err(fault)?;
    let mut command = Command::new(&spec.program);
    command
        .args(&spec.arguments)
        .process_group(group.as_raw())
        .stdin(Stdio::null())
        .stdout(writer.try_clone().map_err(fault)?)
        .stderr(writer);
    if let Some(path) = &spec.library_path {
        command.env("LD_LIBRARY_PATH", library_path(path));
    }
    Ok((command.spawn().map_err(fault)?, log))
}

/// A folder before those that are searched already.
fn library_path(first: &Path) -> std::ffi::OsString {
    let mut all = first.as_os_str().to_owned();
    if let Some(rest) = std::env::var_os("LD_LIBRARY_PATH").filter(|rest| !rest.is_empty()) {
        all.push(":");
        all.push(rest);
    }
    all
}

impl State {
    /// The last lines, for an error message.
    fn log_end(&self) -> String {
        let first = self.lines.len().saturating_sub(LINES_TOLD);
        let lines: Vec<&str> = self.lines.range(first..).map(String::as_str).collect();
        match lines.is_empty() {
            true => String::new(),
            false => format!("; its log ends: {}", lines.join(" | ")),
        }
    }
}

impl Shared {
    /// The last of them is waited for by `stop`.
    fn start_threads(
        self: &Arc<Self>,
        process: Process,
        log: PipeReader,
        mut watcher: Watcher,
    ) -> std::io::Result<JoinHandle<()>> {
        let name = &self.name;
        let life = watcher.life.take();
        let [reader, guarded, waited] = std::array::from_fn(|_| Arc::clone(self));
        thread(format!("log-{name}"), move || reader.read_log(log))?;
        thread(format!("guard-{name}"), move || guarded.guard(life))?;
        thread(format!("child-{name}"), move || {
            waited.wait(process, watcher);
        })
    }

    /// The body of `guard-NAME`: waits for the watcher's end, and ends the child with it.
    fn guard(&self, life: Option<ChildStdout>) {
        if let Some(mut life) = life {
            let _ = std::io::copy(&mut life, &mut std::io::sink()); // its end is all that it says
        }
        let mut state = self.state.lock();
        // Where it is ending anyway, whoever ends it has the last word.
        if !state.is_reaped && !state.is_stopping {
            state.lost_guard = true;
            tracing::warn!(name = %self.name, pid = self.pid,
                "the guard of a child process was killed: so is the child");
            let _ = killpg(self.group, Signal::SIGKILL);
        }
    }

    /// The body of `child-NAME`.
    fn wait(&self, mut process: Process, mut watcher: Watcher) {
        let status = process.wait();
        let status = status.map_or_else(|error| error.to_string(), |status| status.to_string());
        let on_exit = {
            let mut state = self.state.lock();
            watcher.kill(); // whatever it has left behind
            state.is_reaped = true;
            let deadline = Instant::now() + LOG_GRACE;
            while !state.log_ended && !self.changed.wait_until(&mut state, deadline).timed_out() {}
            let how = match state.lost_guard {
                true => format!("it was killed ({status}) because the process that guards it was"),
                false => format!("it ended ({status})"),
            };
            let why = format!("{how}{}", state.log_end());
            if !state.is_stopping {
                // Not louder: who is told by `on_exit` says it with what follows from it.
                tracing::debug!(name = %self.name, pid = self.pid, %why, "child process");
            }
            state.ended = Some(why.clone());
            state.on_exit.take().map(|report| (report, why))
        };
        self.changed.notify_all();
        if let Some((report, why)) = on_exit {
            report(&format!("{}: {why}", self.name));
        }
    }

    /// Whether it has ended, at the latest after `timeout`.
    fn wait_ended(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let mut state = self.state.lock();
        while state.ended.is_none() {
            if self.changed.wait_until(&mut state, deadline).timed_out() {
                return state.ended.is_some();
            }
        }
        true
    }

    /// The body of `log-NAME`: ends when nobody can write any more.
    fn read_log(&self, log: PipeReader) {
        let mut log = BufReader::new(log);
        while let Some(line) = next_line(&mut log) {
            tracing::debug!(name = %self.name, %line, "child process");
            let mut state = self.state.lock();
            if state.lines.len() == LINES_KEPT {
                state.lines.pop_front();
            }
            state.lines.push_back(line);
        }
        self.state.lock().log_ended = true;
        self.changed.notify_all();
    }
}

/// The next line, cut where it is too long; None at the end.
fn next_line(log: &mut BufReader<PipeReader>) -> Option<String> {
    let mut bytes = Vec::new();
    let n_read = log
        .by_ref()
        .take(LINE_BYTES_MAX)
        .read_until(b'\n', &mut bytes);
    match n_read {
        Ok(0) | Err(_) => None,
        Ok(_) => Some(String::from_utf8_lossy(&bytes).trim_end().to_owned()),
    }
}

/// A port of the loopback that was free a moment ago. Somebody else may take it first; then the child
/// cannot listen and ends, which is a failed start like any other.
///
/// # Errors
/// There is none.
pub fn free_port() -> Result<u16, String> {
    let listener = std::net::TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, 0));
    let address = listener.and_then(|listener| listener.local_addr());
    match address {
        Ok(address) => Ok(address.port()),
        Err(error) => Err(format!("no free port: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crossbeam_channel::bounded;

    const LONG: Duration = Duration::from_secs(60);

    fn shell(script: &str) -> ChildSpec {
        ChildSpec {
            name: "t".to_owned(),
            program: "/bin/sh".into(),
            arguments: vec!["-c".to_owned(), script.to_owned()],
            library_path: Some("/first".into()),
            stop_timeout: LONG,
        }
    }

    /// Whether a process is there and no zombie.
    fn is_alive(pid: &str) -> bool {
        let status = std::fs::read_to_string(format!("/proc/{pid}/stat"));
        status.is_ok_and(|text| !text.contains(") Z "))
    }

    /// A killed process that is nobody's child here goes as soon as it gets a turn.
    #[track_caller]
    fn goes(pid: &str) {
        let deadline = Instant::now() + LONG;
        while is_alive(pid) {
            assert!(Instant::now() < deadline, "{pid} was left behind");
            std::thread::yield_now();
        }
    }

    #[test]
    fn an_end_is_reported_with_its_log_and_the_group_goes_with_it() {
        // A grandchild that would outlive it, whose pid is the first line.
        let child = Child::start(&shell(
            "sleep 1000 & echo $!; echo $LD_LIBRARY_PATH; echo no memory >&2; exit 3",
        ))
        .expect("starts");
        let (sender, receiver) = bounded(1);
        child.on_exit(move |why| sender.send(why.to_owned()).expect("is listened to"));
        let why = receiver.recv_timeout(LONG).expect("ends");
        assert!(
            why.contains("exit status: 3") && why.contains("no memory"),
            "{why}"
        );
        let log = child.log();
        assert!(log[1].starts_with("/first"), "{log:?}");
        goes(&log[0]);
        let again = child.wait_ready(LONG, || true);
        assert!(again.unwrap_err().contains("exit status: 3"));
        child.on_exit(|why| assert!(why.contains("exit status: 3")));
    }

    #[test]
    fn stopping_asks_first() {
        let script = "trap 'echo asked; exit 0' TERM; echo ready; while :; do sleep 0.01; done";
        let child = Child::start(&shell(script)).expect("starts");
        child.on_exit(|why| panic!("told to, so no accident: {why}"));
        let ready = child.wait_ready(LONG, || child.log() == ["ready"]);
        ready.expect("is ready");
        let bytes = child.resident_bytes().expect("it runs");
        assert!(bytes > 50 << 10, "{bytes}");
        child.stop();
        let log = child.log();
        assert_eq!(child.resident_bytes(), None, "nothing is left of it");
        assert_eq!(log.last().map(String::as_str), Some("asked"), "{log:?}");
        assert!(!is_alive(&child.pid().to_string()));
        child.stop();
    }

    /// Without its guard a child would outlive a crash of this process, so that it goes too.
    #[test]
    fn a_killed_guard_takes_the_child_along_and_is_told() {
        let child = Child::start(&shell("sleep 1000 & echo $!; wait")).expect("starts");
        let ready = child.wait_ready(LONG, || !child.log().is_empty());
        ready.expect("is ready");
        let (sender, receiver) = bounded(1);
        child.on_exit(move |why| sender.send(why.to_owned()).expect("is listened to"));
        nix::sys::signal::kill(child.shared.group, Signal::SIGKILL).expect("the guard is there");
        let why = receiver.recv_timeout(LONG).expect("it ends");
        assert!(why.contains("the process that guards it was"), "{why}");
        goes(&child.log()[0]);
        child.stop();
    }

    #[test]
    fn who_does_not_listen_is_killed() {
        let spec = ChildSpec {
            stop_timeout: Duration::from_millis(10),
            ..shell("trap '' TERM; echo ready; while :; do sleep 0.01; done")
        };
        let child = Child::start(&spec).expect("starts");
        let ready = child.wait_ready(LONG, || child.log() == ["ready"]);
        ready.expect("is ready");
        let pid = child.pid().to_string();
        drop(child);
        assert!(!is_alive(&pid));
    }

    #[test]
    fn what_cannot_start_and_what_is_not_ready_are_told() {
        let missing = ChildSpec {
            program: "/no/such/program".into(),
            ..shell("")
        };
        let why = Child::start(&missing).err().expect("there is none");
        assert!(why.contains("/no/such/program"), "{why}");
        let child = Child::start(&shell("echo loading; sleep 1000")).expect("starts");
        let logged = child.wait_ready(LONG, || !child.log().is_empty());
        logged.expect("it writes");
        let why = child.wait_ready(Duration::ZERO, || false).unwrap_err();
        assert!(
            why.contains("not ready") && why.contains("loading"),
            "{why}"
        );
    }

    #[test]
    fn long_lines_are_cut_and_only_the_latest_are_kept() {
        let script = "i=0; while [ $i -lt 300 ]; do echo $i; i=$((i+1)); done; \
                      head -c 5000 /dev/zero | tr '\\0' x";
        let child = Child::start(&shell(script)).expect("starts");
        let (sender, receiver) = bounded(1);
        child.on_exit(move |_| sender.send(()).expect("is listened to"));
        receiver.recv_timeout(LONG).expect("ends");
        let log = child.log();
        assert_eq!(log.len(), LINES_KEPT);
        assert_eq!(log[LINES_KEPT - 1].len() + log[LINES_KEPT - 2].len(), 3000);
        assert_eq!(log[LINES_KEPT - 4], "299");
    }
}
