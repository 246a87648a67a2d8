"""Communication: collectives of a process group, sums of messages, and checks that all workers agree."""
