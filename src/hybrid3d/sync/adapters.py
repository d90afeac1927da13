"""A sync of a model's own weights, once, and then of its adapters alone."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid3d.sync.session import Sync, SyncReport


class ChainedSync(Sync):
    """Two syncs one after the other, of which the first happens once: what it sends does not change."""

    def __init__(self, once: Sync, then: Sync):
        self._once: Sequence[Sync] = (once,)  # empty after the first sync
        self._before: Sequence[SyncReport] = ()  # of `once`, in the first sync
        self._then = then

    @property
    def in_progress(self) -> int | None:
        return self._then.in_progress

    def begin(self, version: int, verify: bool = False) -> None:
        """Begin a sync, the first time after a whole one of what is sent once."""
        self._before = [sync.run(version, verify) for sync in self._once]
        self._once = ()
        self._then.begin(version, verify)

    def bucket_ready(self, bucket: int, last: bool) -> None:
        self._then.bucket_ready(bucket, last)

    def finish(self) -> SyncReport:
        report = self._then.finish()
        for before in self._before:
            report = report.after(before)
        self._before = ()
        return report

    def require_dense(self) -> None:
        self._then.require_dense()

    def abandon(self) -> None:
        for sync in (*self._once, self._then):
            sync.abandon()
