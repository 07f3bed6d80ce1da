"""A seccomp filter for programs that are being judged: system calls that they do not need and that reach far.

Filters are programs for the kernel's packet-filter machine over `struct seccomp_data` (seccomp(2)). Only the numbers of
x86-64 are here.
"""

from __future__ import annotations

import platform
import struct

_X86_64 = 0xC000003E
_CLONE, _CLONE_THREAD = 56, 0x00010000
_NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_EPERM, _ENOSYS = 1, 38

# Other processes' memory, namespaces and mounts, the kernel itself; memory that no limit counts (System V, memfd).
_NEVER = (
    *(101, 310, 311, 438),  # ptrace, process_vm_readv, process_vm_writev, pidfd_getfd
    *(155, 161, 165, 166, 272, 308),  # pivot_root, chroot, mount, umount2, unshare, setns
    *(428, 429, 430, 431, 432, 442),  # open_tree, move_mount, fsopen, fsconfig, fsmount, mount_setattr
    *(103, 163, 167, 169, 172, 173),  # syslog, acct, swapon, reboot, iopl, ioperm
    *(175, 176, 246, 313, 320, 321),  # init_module, delete_module, kexec_load, finit_module, kexec_file_load, bpf
    *(248, 249, 250, 298, 304, 323),  # add_key, request_key, keyctl, perf_event_open, open_by_handle_at, userfaultfd
    *(425, 426, 427),  # io_uring_setup, io_uring_enter, io_uring_register
    *(29, 64, 68, 240, 319, 447),  # shmget, semget, msgget, mq_open, memfd_create, memfd_secret
)
# What namespaces would otherwise contain: the network, other processes.
_ALONE = (
    *(41, 42, 49),  # socket, connect, bind
    *(57, 58, 59, 322),  # fork, vfork, execve, execveat
    *(62, 129, 200, 234, 297, 424),  # kill and its relatives, pidfd_send_signal
    *(109, 112),  # setpgid, setsid
)


def build(*, alone: bool) -> bytes:
    """The filter, or nothing where its numbers do not hold.

    Args:
      alone: also refuse sockets, signals and further processes (threads are allowed).
    """
    if platform.machine() != "x86_64":
        return b""
    load_architecture, load_number, load_flags = (_instruction(0x20, 0, 0, offset) for offset in (4, 0, 16))
    kill, allow = _instruction(0x06, 0, 0, 0x80000000), _instruction(0x06, 0, 0, 0x7FFF0000)
    refuse, absent = _instruction(0x06, 0, 0, 0x00050000 | _EPERM), _instruction(0x06, 0, 0, 0x00050000 | _ENOSYS)
    program = [load_architecture, _equal(_X86_64, 1, 0), kill, load_number]
    program += [_instruction(0x35, 0, 1, 0x40000000), kill]  # the x32 interface has numbers of its own
    for number in (*_NEVER, *(_ALONE if alone else ())):
        program += [_equal(number, 0, 1), refuse]
    program += [_equal(435, 0, 1), absent]  # clone3 hides its flags; without it, libc uses clone
    program += [_equal(_CLONE, 0, 5 if alone else 3), load_flags, _any_bit(_NAMESPACES, 0, 1), refuse]
    if alone:
        program += [_any_bit(_CLONE_THREAD, 1, 0), refuse]
    return b"".join([*program, allow])


def _instruction(code: int, if_true: int, if_false: int, operand: int) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, operand)


def _equal(value: int, if_true: int, if_false: int) -> bytes:
    return _instruction(0x15, if_true, if_false, value)


def _any_bit(mask: int, if_true: int, if_false: int) -> bytes:
    return _instruction(0x45, if_true, if_false, mask)
