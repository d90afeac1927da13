"""Formats a plan for people: a page for the terminal, and a picture of the traffic between ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hybrid3d.config import Recipe
from hybrid3d.planning.estimates import SyncTime
from hybrid3d.planning.hardware import GB, TERA
from hybrid3d.planning.memory import gb, max_over_stages
from hybrid3d.planning.report import PlanReport
from hybrid3d.reshard.plan.placement import consecutive_slots

SHADES = " ░▒▓█"
MOST_GROUPS = 16  # rows of the picture on a terminal
MOST_PIXELS = 512  # rows of the picture in a file


def format_page(report: PlanReport) -> RenderableType:
    """Layouts, bytes, seconds, memory, and the traffic drawn."""
    return Group(
        _layouts(report), "", _bytes(report), "", _sentences(report), "", _memory(report), "", _traffic(report)
    )


def _layouts(report: PlanReport) -> Table:
    recipe = report.recipe
    train, rollout = recipe.train, recipe.rollout
    ranks = f"{recipe.train_ranks} + {recipe.generation_ranks}" if recipe.is_split else f"{recipe.sync_ranks}"
    assert rollout is not None
    table = Table(title=f"{recipe.name}: one sync of {gb(report.traffic.model)} over {ranks} GPUs")
    table.add_column("train layout (Megatron)")
    table.add_column("rollout layout (vLLM)")
    experts = f", experts EP{train.ep} x ETP{train.etp}" if train.ep * train.etp > 1 else ""
    interleaved = f" x VPP{train.vpp}" if train.vpp > 1 else ""
    sequences = f" x CP{train.cp}" if train.cp > 1 else ""
    shared = f", experts EP{rollout.tp * rollout.dp}" if rollout.expert_parallel else ""
    table.add_row(
        f"TP{train.tp} x PP{train.pp}{interleaved}{sequences} x DP{train.dp}{experts}",
        f"TP{rollout.tp} x DP{recipe.generation_ranks // rollout.tp}{shared}",
    )
    held, wanted = report.traffic.held[: recipe.train_ranks], report.traffic.wanted[-recipe.generation_ranks :]
    table.add_row(f"holds {_range(held)} a rank", f"wants {_range(wanted)} a rank")
    return table


def _range(of_ranks: np.ndarray) -> str:
    low, high = gb(of_ranks.min()), gb(of_ranks.max())
    return high if low == high else f"{low} to {high}"


def _bytes(report: PlanReport) -> Table:
    table = Table(title="bytes of a sync" if report.adapters is None else "bytes of the first sync, of weights")
    for title in ("", "min of ranks", "mean", "max", "all ranks"):
        table.add_column(title, justify="left" if not title else "right")
    names = {
        "wanted_bytes": "wanted",
        "held_bytes": "held",
        "local_bytes": "already there",
        "received_bytes": "received",
        "received_over_network_bytes": "  of it over the network",
        "sent_bytes": "sent",
        "gather_bytes": "received if gathered",
    }
    for key, of_ranks in report.per_rank.items():
        table.add_row(names[key], gb(of_ranks.min()), gb(of_ranks.mean()), gb(of_ranks.max()), gb(of_ranks.sum()))
    return table


def _sentences(report: PlanReport) -> Text:
    traffic, sync = report.traffic, report.sync
    received, bound = traffic.traffic.sum(), traffic.lower_bound.sum()
    network = report.per_rank["received_over_network_bytes"].sum()
    return Text(
        f"coverage   exact: every wanted element arrives once, from a rank that holds it\n"
        f"received   {received:,} bytes; the lower bound is {bound:,}\n"
        f"network    {network:,} bytes between nodes; the lower bound is {traffic.network_bound:,}\n"
        f"{_quantized(report)}{_placement(report)}"
        f"staging    {traffic.staging / 2**20:.0f} MiB a rank; finalization {gb(traffic.finalize)} at most\n"
        f"{_samples(report)}"
        f"machine    {_machine(report)}\n"
        f"seconds    {sync.seconds:.3f} on {report.recipe.machine.kind}: {_bottleneck(sync)}; "
        f"gathered: {report.gather_traffic.seconds(report.hardware):.3f}"
        f"{_changed(report)}{_adapters(report)}"
    )


def _machine(report: PlanReport) -> str:
    has = report.hardware
    rates = f"{has.bf16_flops / TERA:,g} TFLOP/s in BF16" + (
        f" and {has.fp8_flops / TERA:,g} in FP8" if has.fp8_flops else ""
    )
    return (
        f"{report.recipe.machine.kind}: {gb(has.memory_bytes)} at {has.memory_bandwidth / GB:,g} GB/s; "
        f"{has.nvlink_bandwidth / GB:,g} GB/s to its node and {has.network_bandwidth / GB:,g} GB/s to others in each "
        f"direction; {rates}"
    )


def _samples(report: PlanReport) -> str:
    """Return what samples take; nothing where none are generated."""
    samples = report.samples
    if not samples.answers:
        return ""
    choices = f", and {gb(samples.choice_bytes)} of chosen experts" if samples.choice_bytes else ""
    return (
        f"samples    {gb(samples.received.max())} a rank and step at most: {samples.answers} answers, "
        f"{gb(samples.answer_bytes)} in all{choices}, if they are as long as they may be\n"
    )


def _quantized(report: PlanReport) -> str:
    """Return what FP8 saves; nothing without it."""
    if not report.recipe.quantizes:
        return ""
    wanted, without = report.traffic.wanted.sum(), report.traffic.unquantized
    return (
        f"quantized  {gb(wanted)} wanted in FP8 with block scales, {wanted / without:.3f} of the {gb(without)} in "
        f"{report.recipe.model.dtype}\n"
    )


def _placement(report: PlanReport) -> str:
    """Return what placing vLLM's shards where their weights are saves; nothing where other ranks have the weights."""
    if report.recipe.is_split:
        return ""
    slots = consecutive_slots(report.recipe.sync_ranks), report.traffic.placement.slots
    usual, chosen = (report.traffic_with_slots(of_ranks) for of_ranks in slots)
    return (
        f"placement  {gb(usual['received_bytes'] - chosen['received_bytes'])} fewer received, "
        f"{gb(usual['far_bytes'] - chosen['far_bytes'])} fewer from other nodes, than on consecutive ranks\n"
    )


def _changed(report: PlanReport) -> str:
    changed = report.changed
    if changed is None:
        return ""
    work, kind, refused = changed.work, report.recipe.machine.kind, report.recipe.dense_on_gpus
    if refused:
        chosen = f"no sync of this recipe sends them alone ({refused})"
    else:
        chosen = f"sync.delta=auto sends {'the changed' if changed.is_faster else 'all'} elements"
    return (
        f"\nchanged    {changed.fraction:.3g} of the elements: {gb(changed.delta_bytes)} received, "
        f"{changed.delta_bytes / changed.delta_bound_bytes:.2f} of the entropy, "
        f"{gb(changed.delta_network_bytes)} of it over the network; bitmaps take {gb(changed.bitmap_bytes)} a rank\n"
        f"           {changed.seconds:.3f} seconds on {kind}: {changed.encoding_seconds:.3f} to find, encode, decode "
        f"and write them ({work.launches:,.0f} launches, {work.host_waits:,.0f} waits and "
        f"{gb(work.moved_bytes(changed.fraction))} read and written on a rank); "
        f"{changed.wire.seconds:.3f} of messages\n"
        f"           {chosen}: sending all takes {changed.dense_seconds:.3f} seconds beside the optimizer's step"
    )


def _adapters(report: PlanReport) -> str:
    """Return what the syncs after the first one send; nothing where all of them send weights."""
    adapters = report.adapters
    if adapters is None:
        return ""
    return (
        f"\nadapters   {adapters.received_bytes:,} bytes received in each later sync; the lower bound is "
        f"{adapters.lower_bound_bytes:,}; {adapters.network_bytes:,} over the network; "
        f"{adapters.time.seconds:.6f} seconds at full bandwidth, without the launches of their many small copies"
    )


def _bottleneck(sync: SyncTime) -> str:
    names = {"network": "the network", "nvlink": "NVLink", "copies": "copies in memory"}
    others = ", ".join(f"{text} {getattr(sync, key):.3f}" for key, text in names.items() if key != sync.bottleneck)
    return f"{names[sync.bottleneck]} of rank {sync.rank} decides ({others})"


def _memory(report: PlanReport) -> Table:
    memory = report.memory
    table = Table(title=f"memory of the fullest GPU, of {gb(memory.capacity)}")
    for title in ("phase", "taken", "of it"):
        table.add_column(title, justify="right" if title == "taken" else "left")
    most = max_over_stages(memory.stages)
    stays = [
        f"{key} {gb(most[key])}" for key in ("weights", "gradients", "optimizer", "reference", "changes") if most[key]
    ]
    reserve = memory.reserve
    communicators = reserve.training_communicators + reserve.rollout_communicators
    table.add_row(
        "always",
        gb(reserve.total),
        f"contexts {gb(reserve.contexts)}, NCCL {gb(communicators)}, graphs {gb(reserve.graphs)}",
    )
    table.add_row("train", gb(memory.train), ", ".join([*stays, f"activations {gb(most['activations'])}"]))
    table.add_row(
        "sync", gb(memory.sync), f"... rollout weights {gb(most['rollout_weights'])}, staging and finalization"
    )
    table.add_row(
        "generate",
        gb(memory.generate),
        f"... vLLM {gb(memory.rollout)}: KV cache {gb(memory.kv_cache)}, "
        f"{memory.kv_tokens // memory.max_model_len} sequences of {memory.max_model_len} tokens",
    )
    checkpoint = report.checkpoint
    shares = f"of a node's {gb(checkpoint.capacity)} of host memory, {gb(checkpoint.gathered)} if gathered"
    table.add_row("checkpoint", gb(checkpoint.node), f"{shares}: run.optimizer_sharding={checkpoint.sharding}")
    return table


def _traffic(report: PlanReport) -> Text:
    """Return a matrix of shades: a row per sender, a column per receiver, darker for more bytes."""
    matrix, size = group_traffic(report.traffic.traffic, report.recipe, MOST_GROUPS)
    shade = np.ceil(matrix / max(1, matrix.max()) * (len(SHADES) - 1)).astype(int)
    what = f"{size} ranks" if size > 1 else "rank"
    scale = f"a cell is {what} to {what}, the darkest {gb(matrix.max())}"
    text = Text(f"who sends (down) to whom (across): {scale}\n")
    for row in shade:
        text.append("  " + "".join(SHADES[cell] * 2 for cell in row) + "\n")
    return text


def group_traffic(traffic: np.ndarray, recipe: Recipe, most: int) -> tuple[np.ndarray, int]:
    """Return the traffic between groups of consecutive ranks, at most `most` of them, and the size of a group."""
    size, ranks = 1, len(traffic)
    while ranks // size > most or ranks % size:
        size = max(2, recipe.machine.gpus_per_node) if size == 1 else size * 2
        if size >= ranks:
            size = ranks
    groups = ranks // size
    return traffic.reshape(groups, size, groups, size).sum((1, 3)), size


def draw(report: PlanReport, path: Path) -> None:
    """Draw the traffic between ranks into a file, whose suffix sets the format."""
    from matplotlib.figure import Figure

    matrix, size = group_traffic(report.traffic.traffic, report.recipe, MOST_PIXELS)
    figure = Figure(figsize=(7, 6), layout="tight")
    axis = figure.subplots()
    image = axis.imshow(matrix / 1e9, cmap="viridis", interpolation="nearest")
    unit = f"group of {size} ranks" if size > 1 else "rank"
    axis.set_xlabel(f"receiving {unit}")
    axis.set_ylabel(f"sending {unit}")
    axis.set_title(f"{report.recipe.name}: GB sent in one sync", fontsize=10)
    figure.colorbar(image, ax=axis, label="GB")
    figure.savefig(path, dpi=120)
