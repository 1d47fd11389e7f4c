"""Which layers the stages of a pipeline have. Free of torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from nemorl.checks import at_least, require

FIRST, LAST = (f"parallel.num_layers_in_{end}_pipeline_stage" for end in ("first", "last"))


@dataclass(frozen=True)
class Stages:
    """The stages of `pp` devices, of which each has every pp-th stage, `vpp` of them.

    first, last: layers of the first and the last device, in all its stages together; None: as many
        as make stages as equal as can be.
    """

    pp: int
    vpp: int
    first: int | None
    last: int | None

    def check(self) -> None:
        """Raise ValueError for settings that suit no model."""
        fits, remedy = self.vpp == 1 or self.pp > 1, "remove it, or raise parallel.pp"
        require(fits, "parallel.vpp", "must be 1 without parallel.pp", self.vpp, remedy)
        for field, layers in self._given().items():
            at_least(1, **{field.replace(".", "__"): layers})
            require(self.pp > 1, field, "needs parallel.pp above 1", layers, remedy)
            requirement = f"must be a multiple of parallel.vpp, which is {self.vpp}"
            require(not layers % self.vpp, field, requirement, layers, "change one of them")

    def layers(self, num_layers: int) -> tuple[range, ...]:
        """Return the layers of each stage, in order.

        >>> [len(stage) for stage in Stages(4, 1, None, None).layers(94)]
        [23, 24, 24, 23]
        >>> [len(stage) for stage in Stages(2, 2, 2, None).layers(8)]
        [1, 3, 1, 3]
        """
        count = self.pp * self.vpp
        given: dict[int, int] = {}
        for rank, layers in ((0, self.first), (self.pp - 1, self.last)):
            if layers is not None:
                given |= dict.fromkeys(range(rank, count, self.pp), layers // self.vpp)
        free = [index for index in range(count) if index not in given]
        costs = [(index == 0) + (index == count - 1) for index in free]
        shared = _shared(num_layers - sum(given.values()), costs)
        counts = given | dict(zip(free, shared, strict=True))
        bounds = list(accumulate((counts[index] for index in range(count)), initial=0))
        return tuple(map(range, bounds, bounds[1:]))

    def problem(self, num_layers: int) -> str | None:
        """Return a sentence where layers can't be shared out among the stages."""
        of_model = f"the model's num_hidden_layers {num_layers}"
        given = self._given()
        left, others = num_layers - sum(given.values()), (self.pp - len(given)) * self.vpp
        if left >= others and (others or not left):
            return None
        if not given:
            return f"parallel.{self._degrees()} has more stages than {of_model}"
        settings = " and ".join(f"{field} {layers}" for field, layers in given.items())
        stages = f"the other {others} stages" if others else "no other stage"
        return f"{settings} leave {left} of {of_model} for {stages}"

    def remedy(self, num_layers: int) -> str:
        """Return what to do about a problem."""
        if self._given():
            return "change these, or remove them for stages as equal as can be"
        most = num_layers // self.vpp
        if self.vpp == 1:
            return f"parallel.pp may be at most {most} here"
        with_vpp = f"parallel.pp may be at most {most} here with this vpp, or remove vpp"
        return with_vpp if most > 1 else "remove parallel.vpp"

    def _given(self) -> dict[str, int]:
        settings = {FIRST: self.first, LAST: self.last}
        return {field: layers for field, layers in settings.items() if layers is not None}

    def _degrees(self) -> str:
        return f"pp {self.pp}" + f" · vpp {self.vpp}" * (self.vpp > 1)


def _shared(num_layers: int, costs: list[int]) -> Iterator[int]:
    """Yield the layers of stages that have as equal ones as can be, where what a stage has besides
    costs as much as some layers.

    What does not divide goes to stages at the ends, so that they have no fewer layers than others,
    and then to the latest ones, which keep the activations of the fewest microbatches.

    >>> [[*_shared(layers, [1, 0, 0, 1])] for layers in (4, 5, 6, 7, 8)]
    [[1, 1, 1, 1], [1, 1, 2, 1], [1, 2, 2, 1], [2, 2, 2, 1], [2, 2, 2, 2]]
    """
    if not costs:
        return
    each, more = divmod(num_layers + sum(costs), len(costs))
    ends = [index for index, cost in enumerate(costs) if cost]
    others = [index for index, cost in enumerate(costs) if not cost]
    larger = [*ends, *reversed(others)][:more]
    for index, cost in enumerate(costs):
        yield each - cost + (index in larger)
