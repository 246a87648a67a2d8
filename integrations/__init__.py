"""Adapters: each translates a framework's gradients into (flat buffer, layout) and back."""

if __name__ != "powersgd_triton.integrations":
    raise ImportError(
        f"the adapters are imported as powersgd_triton.integrations, not as {__name__!r}: "
        "write `from powersgd_triton.integrations import ddp`"
    )
