"""Process groups: collectives, the exchange of messages, and whether all workers do the same."""
