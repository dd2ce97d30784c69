"""A sandbox for untrusted code: it runs alone, in a process that can neither harm nor see anything else.

`Sandbox` of `palestra.tasks.sandbox.sandbox` has one level, which every verdict on code records:

- `namespaces`: it sees no other process, has no network, and of the file system only Python and the system's libraries,
  read-only, and an empty `/tmp` of its own in memory. For root it runs as a dedicated, otherwise unused user; for
  others it has no rights in a user namespace.
- `uid`: for root where namespaces are not allowed, as in most containers. A dedicated user, who must be able to read
  Python, and a folder of its own; where the kernel has Landlock (5.13), nothing else of the file system but Python,
  read-only. It can fill the disk with many files until it is killed.
- `weak`: neither. It runs as the calling user, who is protected by the limits below alone. Tests that have to run in
  the candidate's own process are `weak` too, wherever that is: code can then report that it passed.

At all levels there are limits (`Limits`) on memory, processor time, threads, output and files, a wall clock, and on
Linux a filter of system calls: no new processes, no programs, no sockets, no signals to others, no tracing, no shared
memory, no kernel interfaces that a function could not need. The first two levels are refused where there is no filter.

Nothing is imported here: what the server never loads, the programs that it forks need not copy.
"""
