"""The noise of the policy's gradient."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Gt

from treetune.contracts import Finding, Need, SampledAnswers
from treetune.runtime.analysis import Analyzer, Findings
from treetune.runtime.base import PolicyIteration
from treetune.runtime.directory import ExperimentDirectory
from treetune_lab.analyzers.figures import iteration_axis, legend_below, panels, style_of
from treetune_lab.analyzers.points import OfCheckpoints, choose, iterations_with, require_critic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from treetune.runtime.sampler import Sampler

EPISODES = "episodes.arrow"


@Analyzer.register("gradient_variance")
@dataclass(frozen=True, kw_only=True)
class GradientVariance(OfCheckpoints):
    """The policy's gradient on minibatches of an iteration's episodes, at the weights that sampled
    them: those after as many iterations. The loss is the experiment's own, before any update.

    `minibatch_size` episodes (or pairs) each, at most `minibatches` of them, each episode once. Episodes
    of one problem are in different minibatches, as in training. What is said of them is in `GradientSums`.
    """

    minibatch_size: Annotated[int, Gt(0)] = 16
    minibatches: Annotated[int, Gt(1)] = 32

    needs = (
        Need(SampledAnswers(), "it takes gradients of what the policy sampled", "leave the analysis out"),
    )

    def check(self, experiment: PolicyIteration) -> Iterable[Finding]:
        yield from super().check(experiment)
        if experiment.restart == "every_iteration":
            yield Finding(
                "every iteration trains the start weights anew (restart), so no gradient is taken at the"
                " weights that sampled its episodes",
                "type",
                "leave the analysis out, or set restart to 'never'",
            )

    def points(self, config: PolicyIteration, directory: ExperimentDirectory) -> list[int]:
        if config.restart == "every_iteration":
            raise ValueError(
                "every iteration trains the start weights anew (restart), so no gradient is taken at the"
                " weights that sampled its episodes"
            )
        kept = [0, *directory.checkpoints()]
        with_episodes = set(iterations_with(directory, EPISODES))
        both = [point for point in kept if point in with_episodes]
        if not both:
            raise ValueError(
                f"{directory.path} has no iteration whose episodes and whose weights both are there: of the"
                f" checkpoints {kept} none has an iteration with {EPISODES}"
            )
        what = f"a checkpoint in {directory.path} whose weights sampled an iteration that is kept"
        points = choose(self.checkpoints, both, self.at_most, what, f"there are {both}")
        if config.credit.needs_critic and not config.credit.asks_critic:
            for point in points:
                require_critic(config, directory, point)
        return points

    def analyse(self, sampler: Sampler, points: Sequence[int], work: Path) -> Findings:
        from treetune_lab.analyzers.gradients import gradient_sums

        numbers = {}
        rows = []
        for point in points:
            with sampler.phase(f"gradients after iteration {point}", "minibatches") as show:
                sums, own = gradient_sums(
                    sampler.session, point, self.minibatch_size, self.minibatches, self.seed, progress=show
                )
            numbers[str(point)] = sums.numbers()
            rows += own
        return Findings({"minibatch_size": self.minibatch_size, "by_checkpoint": numbers}, rows)

    @staticmethod
    def draw(results: Mapping[str, Mapping[str, Any]]) -> Figure:
        figure, (relative, scale) = panels(
            ["Variance of the gradient over its squared norm", "Noise scale, in episodes"]
        )
        for i, (label, result) in enumerate(results.items()):
            style = style_of(i) | {"label": label}
            by_point = result["numbers"]["by_checkpoint"]
            for axes, measure in ((relative, "relative_variance"), (scale, "noise_scale")):
                known = [(int(p), n[measure]) for p, n in by_point.items() if n[measure] is not None]
                axes.plot([x for x, _ in known], [y for _, y in known], markersize=4.5, **style)
        for axes in (relative, scale):
            iteration_axis(axes)
            axes.set_yscale("log")
        legend_below(figure, relative)
        return figure
