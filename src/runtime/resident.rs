//! The main memory that a child process and everything it started hold, from `/proc`.
//!
//! Pure reading. Counted are the processes of its group, whose leader (the watcher of `child`) is not
//! one of them, and all their descendants, also those that left the group. A page that several processes
//! map counts in parts (`Pss`), so that two servers with the same file do not count it twice; where the
//! kernel does not say, as resident (`VmRSS`). Memory of GPUs is not in it.

use std::collections::{BTreeMap, BTreeSet};

/// Parent and group of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Family {
    parent: u32,
    group: u32,
}

/// Bytes of the group `group` without its leader, and of their descendants; None when nothing is left
/// of it or `/proc` does not tell.
#[must_use]
pub fn group_bytes(group: u32) -> Option<u64> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir("/proc").ok()?.flatten() {
        let name = entry.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
        if let Some(family) = stat.ok().and_then(|stat| family_of(&stat)) {
            found.insert(pid, family);
        }
    }
    let members = members(&found, group);
    let bytes: Vec<u64> = members.into_iter().filter_map(process_bytes).collect();
    match bytes.is_empty() {
        true => None,
        false => Some(bytes.into_iter().fold(0, u64::saturating_add)),
    }
}

/// Of `/proc/PID/stat`; the program's name stands in brackets and may hold anything.
fn family_of(stat: &str) -> Option<Family> {
    let (_, rest) = stat.rsplit_once(')')?;
    let mut words = rest.split_whitespace().skip(1); // the state
    Some(Family {
        parent: words.next()?.parse().ok()?,
        group: words.next()?.parse().ok()?,
    })
}

fn members(found: &BTreeMap<u32, Family>, group: u32) -> BTreeSet<u32> {
    let of_group = found.iter().filter(|(_, family)| family.group == group);
    let mut members: BTreeSet<u32> = of_group.map(|(pid, _)| *pid).collect();
    loop {
        let is_child = |family: &Family| members.contains(&family.parent);
        let more = found
            .iter()
            .filter(|(pid, family)| is_child(family) && !members.contains(pid));
        let more: Vec<u32> = more.map(|(pid, _)| *pid).collect();
        if more.is_empty() {
            break;
        }
        members.extend(more);
    }
    members.remove(&group);
    members
}

fn process_bytes(pid: u32) -> Option<u64> {
    let field = |file: &str, name: &str| {
        let text = std::fs::read_to_string(format!("/proc/{pid}/{file}")).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        let kilobytes: u64 = line.split_whitespace().next()?.parse().ok()?;
        kilobytes.checked_mul(1024)
    };
    field("smaps_rollup", "Pss:").or_else(|| field("status", "VmRSS:"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_its_processes_and_their_descendants_without_its_leader() {
        let family = |parent, group| Family { parent, group };
        let found = BTreeMap::from([
            (1, family(0, 1)),
            (10, family(1, 10)),  // the leader
            (11, family(1, 10)),  // the child
            (12, family(11, 12)), // left the group
            (13, family(12, 12)),
            (14, family(1, 14)), // somebody else's
        ]);
        let expected = BTreeSet::from([11, 12, 13]);
        assert_eq!(members(&found, 10), expected);
        assert!(members(&found, 99).is_empty());
    }

    #[test]
    fn lines_of_proc_are_read_whatever_the_program_is_called() {
        let stat = "42 (a) (b) 7) S 17 23 23 0 -1";
        let family = Family {
            parent: 17,
            group: 23,
        };
        assert_eq!(family_of(stat), Some(family));
        assert_eq!(family_of("42 nothing"), None);
        let own = process_bytes(std::process::id()).expect("this process has memory");
        assert!(own > 100 << 10, "{own}");
    }
}
