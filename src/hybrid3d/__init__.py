"""RL post-training with Megatron-Core and vLLM: weights move between their layouts by one checked plan."""

__version__ = "0.1.0"


def installed_version(*packages: str) -> str | None:
    """Return the version of the first of these packages that is installed; None if none is."""
    from importlib.metadata import PackageNotFoundError, version

    for package in packages:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None
