"""The glossary's entries on effective depth: rows of depth.csv. `glossary` makes them entries like all others.

Each is a name, a title, a formula, a reading and a source. A value is one number a model, counted in units.
"""

from __future__ import annotations

__all__ = ["DEPTHS"]

DEPTHS: tuple[tuple[str, str, str, str, str], ...] = (
    (
        "stages",
        "fewest sequential stages that keep the predictions",
        "D(κ): fewest stages of contiguous merged or dropped units with KL(unchanged ‖ changed) ≤ κ · KL(unchanged ‖ "
        "the corpus's unigram), interpolated between counts; half of the sequences choose, the others score",
        "The number of steps that must come one after another, at a price of κ in predictions.",
        "",
    ),
    (
        "dependence",
        "depth of the graph of who reads whom",
        "D = Σ_s w_out,s d_s, d_t = 1 + Σ_s w_ts d_s, d of the embedding 0, w_ts = a_ts² / Σ_s a_ts² per token, then "
        "averaged, a as in update_dependence; variant `first power`: a_ts in place of a_ts²",
        "1: every unit reads the embedding alone; N: each reads the one before it; 1 less the readout's share of x_0.",
        "",
    ),
    (
        "cosine_crossing",
        "units before updates turn from erasing to reinforcing",
        "units before the last one at which the mean cos(u, s) goes from negative to non-negative",
        "A published definition, shown with what other thresholds give.",
        "Hu et al. 2025",
    ),
    (
        "lens_kl_depth",
        "units before the lens predicts nearly what the model does",
        "first l with KL(p_final ‖ readout of x_l) < 0.1 of its maximum over l",
        "A published definition, shown with what other thresholds give.",
        "Hu et al. 2025",
    ),
    (
        "lens_overlap_depth",
        "units before the lens ranks first what the model does",
        "first l where the readout of x_l and the final one share, in the mean, more than 0.2 of their top 5 tokens",
        "A published definition, shown with what other thresholds give.",
        "Hu et al. 2025",
    ),
    (
        "depth_score",
        "centre of mass of the units' effects",
        "Σ l · effect_l / Σ effect_l, l = 1 … N, effect_l = ‖p' − p‖₂ of the probabilities without unit l; `updates`: "
        "mean relative change of later updates; `later tokens`: skipped at the first tokens, measured after them",
        "No count: (N + 1) / 2 for N equal units, however they are wired.",
        "Csordás et al. 2025",
    ),
    (
        "participation",
        "units that have a share in the predictions",
        "exp(−Σ p_l log p_l), p_l = KL of skipping unit l over the sum of all; 0 if all are 0",
        "How many write, not how deep: the same for a chain and for branches side by side.",
        "",
    ),
    (
        "path_elasticity",
        "branches that the gradient came through, in the trace gauge",
        "⟨Σ k g_k, g⟩ / ‖g‖², g = Σ g_k the loss's gradient at x_0 by the number k of branches passed, of unit "
        "Jacobians N'[(1+α)I + (B − αI)], B = ∂u/∂s, α = tr(B)/d: only B − αI counts; each target's loss has a random "
        "sign",
        "0: nothing was passed that does more than rescale; N: every unit was passed, as in a chain without skips. Its "
        "profile by unit sums to it.",
        "",
    ),
    (
        "direct_share",
        "share of the gradient that came by skips alone, in the trace gauge",
        "⟨g_0, g⟩ / ‖g‖²",
        "1: no branch matters to the gradient at x_0; where no branch reads another, path_elasticity is 1 less this.",
        "",
    ),
    (
        "path_elasticity_raw",
        "branches that the gradient came through",
        "⟨Σ k g_k, g⟩ / ‖g‖², g_k the part of the loss's gradient at x_0 that passed k branches; Σ k g_k is its "
        "derivative by a common gain on the Jacobians of all branches",
        "A diagnostic: it changes when the stream is rescaled and the function is not.",
        "after Veit et al. 2016",
    ),
    (
        "direct_share_raw",
        "share of the gradient that came by skips alone",
        "⟨g_0, g⟩ / ‖g‖², every branch as it is",
        "1: no branch matters to the gradient at x_0.",
        "after Veit et al. 2016",
    ),
    (
        "path_spectrum",
        "mean number of branches by the energy of the gradient's parts",
        "D⁺ = Σ k ‖g_k‖² / Σ_{k≥1} ‖g_k‖², g_k the part of the loss's gradient at x_0 that passed k branches",
        "Means nothing where the parts cancel, which path_cross tells.",
        "after Veit et al. 2016",
    ),
    (
        "path_cross",
        "how much of the parts' energy is left in their sum",
        "‖Σ g_k‖² / Σ ‖g_k‖²",
        "1: the parts do not interfere; far below 1: they cancel, path_spectrum says nothing; above 1: they add up.",
        "",
    ),
)
