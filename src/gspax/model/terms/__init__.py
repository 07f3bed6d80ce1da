"""The terms of gspax's own settings, one file each; `passes.Passes.terms` lists those of an experiment."""

from __future__ import annotations

from collections.abc import Callable

from gspax.config import Experiment, Regularizers
from gspax.config.functions import takes_score_norms
from gspax.config.term import Term
from gspax.model.terms.centering import CenteringTerm
from gspax.model.terms.correction import CorrectionTerm, RejectionTerm
from gspax.model.terms.reference import ReferenceTerm
from gspax.model.terms.regularizers import CovarianceTerm, EntropyTerm, SamplerDistanceTerm
from gspax.model.terms.routers import LoadBalanceTerm, RouterLogitsTerm
from gspax.model.terms.score_norms import ScoreNormTerm
from gspax.model.terms.selection import SelectionTerm
from gspax.model.terms.teacher import TeacherTerm

# Each makes the term of a setting, or None. Penalties are added, and weights multiplied, in this order.
MAKERS: tuple[Callable[[Experiment], Term | None], ...] = (
    lambda e: ScoreNormTerm() if takes_score_norms(e.advantage) else None,
    lambda e: None if e.correction is None else CorrectionTerm(function=e.correction),
    lambda e: None if e.selection is None else SelectionTerm(function=e.selection),
    lambda e: None if e.rejection is None else RejectionTerm(function=e.rejection),
    lambda e: CenteringTerm(loss=e.loss) if e.center_scores else None,
    lambda e: None if e.reference is None else ReferenceTerm(settings=e.reference),
    lambda e: None if e.teacher is None else TeacherTerm(settings=e.teacher),
    lambda e: _entropy(e.regularizers),
    lambda e: None if e.regularizers.kl_cov is None else CovarianceTerm(settings=e.regularizers.kl_cov),
    lambda e: SamplerDistanceTerm(coefficient=x) if (x := e.regularizers.log_ratio_square) else None,
    lambda e: LoadBalanceTerm(coefficient=x, router=e.model.router) if (x := e.regularizers.load_balance) else None,
    lambda e: RouterLogitsTerm(coefficient=x) if (x := e.regularizers.router_z) else None,
)


def _entropy(settings: Regularizers) -> EntropyTerm | None:
    is_on = settings.entropy or settings.adaptive_entropy is not None
    return EntropyTerm(coefficient=settings.entropy, adaptive=settings.adaptive_entropy) if is_on else None
