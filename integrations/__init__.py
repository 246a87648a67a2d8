"""Adapters. Each translates a framework's gradients into named gradients for the engine, and writes back averages."""

if __name__ != "powersgd_triton.integrations":
    raise ImportError(
        f"import the adapters as powersgd_triton.integrations, not as {__name__!r}: "
        "write `from powersgd_triton.integrations import ddp`"
    )
