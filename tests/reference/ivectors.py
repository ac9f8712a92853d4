"""i-vectors by dense Gaussians and by loops over frames, from the definitions.

Frames of Gaussian i are N(M_i x, Sigma_i) and x is N(p e_0, I); all frames of an utterance are then
one large Gaussian. Letters: T frames, D features, I Gaussians, S dimension of an i-vector.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def _stacked(M_IDS: Array, covariance_IDD: Array, gaussian_T: list[int], weight_T: list[float]) -> tuple[Array, Array]:
    """(what x is multiplied by to give the means of all frames, their covariance given x)."""
    dim = M_IDS.shape[1]
    B = np.concatenate([M_IDS[i] for i in gaussian_T])
    noise = np.zeros((len(B), len(B)))
    for t, (i, weight) in enumerate(zip(gaussian_T, weight_T, strict=True)):
        # a frame counted w times
        noise[t * dim:(t + 1) * dim, t * dim:(t + 1) * dim] = covariance_IDD[i] / weight
    return B, noise


def posterior(M_IDS: Array, covariance_IDD: Array, mean_S: Array, frames_TD: Array, gaussian_T: list[int],
              weight_T: list[float]) -> tuple[Array, Array]:
    """(mean, covariance) of x, by conditioning the joint Gaussian of x and all frames."""
    B, noise = _stacked(M_IDS, covariance_IDD, gaussian_T, weight_T)
    gain = B.T @ np.linalg.inv(B @ B.T + noise)
    return mean_S + gain @ (frames_TD.reshape(-1) - B @ mean_S), np.eye(len(mean_S)) - gain @ B


def log_likelihood(M_IDS: Array, covariance_IDD: Array, mean_S: Array, prior_SS: Array, frames_TD: Array,
                   gaussian_T: list[int]) -> float:
    """Of all frames of an utterance; the prior of x is N(mean_S, prior_SS)."""
    B, noise = _stacked(M_IDS, covariance_IDD, gaussian_T, [1.0] * len(gaussian_T))
    total = B @ prior_SS @ B.T + noise
    rest = frames_TD.reshape(-1) - B @ mean_S
    sign, log_det = np.linalg.slogdet(total)
    assert sign > 0
    return float(-0.5 * (len(rest) * math.log(2 * math.pi) + log_det + rest @ np.linalg.solve(total, rest)))


def running_means(frames_TD: Array, *, window: int, before: list[Array], most_before: int, global_mean_D: Array,
                  most_global: int) -> Array:
    """T x D: mean up to each frame, with earlier utterances and the global mean as frames."""
    earlier = np.concatenate(before) if before else np.zeros((0, frames_TD.shape[1]))
    means = []
    for t in range(len(frames_TD)):
        heard = list(frames_TD[max(0, t + 1 - window):t + 1])
        lent = min(window - len(heard), most_before, len(earlier))
        total, count = sum(heard) + (lent * earlier.mean(axis=0) if lent else 0.0), float(len(heard) + lent)
        lent = min(window - len(heard) - lent, most_global)
        means.append((total + lent * global_mean_D) / (count + lent))
    return np.array(means)


def spliced(frames_TD: Array, t: int, context: int) -> Array:
    return np.concatenate([frames_TD[min(max(s, 0), len(frames_TD) - 1)] for s in range(t - context, t + context + 1)])


def log_density(x_D: Array, weight_I: Array, mean_ID: Array, variance_ID: Array) -> Array:
    """log of weight times density under every Gaussian."""
    return np.array([math.log(w) + sum(-0.5 * math.log(2 * math.pi * v) - (x - m) ** 2 / (2 * v)
                                       for x, m, v in zip(x_D, mean_D, variance_D, strict=True))
                     for w, mean_D, variance_D in zip(weight_I, mean_ID, variance_ID, strict=True)])


def pruned_posterior(log_I: Array, num_gselect: int, min_post: float) -> Array:
    best = sorted(range(len(log_I)), key=lambda i: -log_I[i])[:num_gselect]
    share = {i: math.exp(log_I[i] - log_I[best[0]]) for i in best}
    total = sum(share.values())
    kept = {i: value / total for i, value in share.items() if value / total >= min_post}
    post_I = np.zeros(len(log_I))
    for i, value in kept.items():
        post_I[i] = value / sum(kept.values())
    return post_I


def estimate(M_IDS: Array, covariance_IDD: Array, prior_offset: float, count_I: Array, first_ID: Array, max_count: float) -> Array:
    """The i-vector without its prior mean; the prior counts more beyond `max_count` frames."""
    dim = M_IDS.shape[2]
    scale = max(count_I.sum(), max_count) / max_count if max_count else 1.0
    quadratic, linear = scale * np.eye(dim), scale * prior_offset * np.eye(dim)[0]
    for M_DS, covariance_DD, count, first_D in zip(M_IDS, covariance_IDD, count_I, first_ID, strict=True):
        quadratic = quadratic + count * M_DS.T @ np.linalg.inv(covariance_DD) @ M_DS
        linear = linear + M_DS.T @ np.linalg.inv(covariance_DD) @ first_D
    return np.asarray(np.linalg.solve(quadratic, linear) - prior_offset * np.eye(dim)[0])
