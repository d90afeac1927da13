"""The engines: which kernels will train, and what the checks before a start say."""

from __future__ import annotations

from collections.abc import Iterator

from hybrid3d.doctor.finding import CANNOT_START, SLOW, Context, Finding


def check_kernels(context: Context) -> Iterator[Finding]:
    """Report which packages' kernels train."""
    found = context.answers.get("kernels", {})
    if "error" in found:
        fix = "the findings about packages name the commands; requirements/ has all versions"
        yield Finding(f"the training engine cannot be used: {found['error']}", CANNOT_START, fix)
    elif "answer" in found:
        line = found["answer"]
        if "(CUDA)" in line:
            yield Finding(f"{line}: not fused", SLOW, "install Transformer Engine, as Dockerfile does")
        else:
            yield Finding(line)


def check_preflight(context: Context) -> Iterator[Finding]:
    """Report each message of the checks that `hybrid3d train` makes before it starts ranks; they name the fix."""
    if context.recipe is None:
        return
    messages = [] if not context.answer("devices") else [context.answer("devices")]
    for question in ("devices", "preflight"):
        if "error" in context.answers.get(question, {}):
            messages.append(f"the checks before a start failed: {context.answers[question]['error']}")
    messages += context.answer("preflight") or []
    for message in messages:
        yield Finding(message, CANNOT_START)
    if not messages:
        yield Finding(f"the model, the data and the layout of {context.recipe.name} fit together")
