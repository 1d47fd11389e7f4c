"""When a run's generator is awake, which weights it has, and what it samples ahead."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from nemorl.rollout.generation import GenerationBackend
from nemorl.runtime.run.groups import GroupStream
from nemorl.runtime.run.weight_sync import sync_weights
from nemorl.runtime.store.files import check_writer


class Sampler:
    """The generator of a run between the trainer's steps, and the streams that sample ahead."""

    def __init__(self, run: Any) -> None:
        """run: an `OpenRun`."""
        self.run = run
        self.streams: list[GroupStream] = []
        self.synced: dict[int, int] = {}
        """Finished steps when the generator last got a version of the weights, by version."""
        self.ahead = hasattr(run.config, "async_") and run.config.async_.max_staleness > 0
        """Whether the run samples ahead."""
        self._awake = False

    @contextmanager
    def awake(self) -> Iterator[GenerationBackend]:
        """Have the generator awake with the trainer's present weights (`OpenRun.sampling`)."""
        run, nested = self.run, self._awake
        generator: GenerationBackend = run.generator
        # Of what is in flight, no token may have the trainer's new weights and the old version:
        # where the engine computes with them, it wakes with the new one, and rests in between.
        later = self.ahead and run.config.generation.traits.embedded
        with nullcontext() if run.present is None else run.present.timed("sync"):
            if not nested:
                run.make_room()
                if not later:
                    generator.wake()
            changed = self._update(generator)
            if later:
                generator.wake()
            for stream in self.streams if changed or not nested else ():
                stream.after_update(changed=changed)
        self._awake = True
        try:
            yield generator
        finally:
            check_writer(run.directory)  # after rewards, and before an engine is called
            self._awake = nested
            if not nested or later:
                self._rest(generator)

    def synced_at(self, version: int) -> int:
        """Return the finished steps when the generator got a version of the weights. One between
        two, as a replica gets that comes back between two minibatches, counts as the older.
        """
        if version in self.synced:
            return self.synced[version]
        known = [each for each in self.synced if each < version]
        if not known or version > max(self.synced):
            raise RuntimeError(
                f"tokens must carry a version of the trainer's weights, but the engine gave"
                f" {version}: completions have policy_versions of the last update_weights"
            )
        return self.synced[max(known)]

    def end_step(self) -> None:
        """Note that the present step has ended."""
        for stream in self.streams:
            stream.end_step()

    def close(self) -> None:
        """End what is in flight."""
        for stream in self.streams:
            stream.close()

    def _update(self, generator: GenerationBackend) -> bool:
        """Give the generator the trainer's weights, and return whether they changed."""
        run = self.run
        changed = generator.policy_version != run.trainer.step
        for stream in self.streams if changed else ():
            stream.before_update()
        waits = any(stream.settings.in_flight == "wait" for stream in self.streams)
        sync_weights(run.trainer, generator, in_flight="wait" if waits else "keep")
        self.synced[run.trainer.step] = run.state.step
        if changed and run.present is not None:
            run.present.sent += 1
        return changed

    def _rest(self, generator: GenerationBackend) -> None:
        """Have the generator sleep, and what is sampled ahead wait for it."""
        for stream in self.streams if getattr(generator, "sleeps", True) else ():
            stream.pause()
        generator.sleep()
