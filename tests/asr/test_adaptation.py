"""LDA, MLLT, mixtures of states, and fMLLR."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

from ngsgd.asr.adapt import projections, speakers
from ngsgd.asr.adapt.speakers import SpeakerAdaptation
from ngsgd.asr.features import gaussians
from ngsgd.asr.features.gaussians import StateMixtures
from ngsgd.errors import DataError
from tests.reference import fmllr as reference

D, NUM_PDFS = 3, 4


def mixtures(seed: int = 0) -> StateMixtures:
    """Two Gaussians per pdf; pdf 0 is silence."""
    rng = np.random.default_rng(seed)
    pdf_G = np.repeat(np.arange(NUM_PDFS), 2)
    return StateMixtures(pdf_G, np.log(np.tile([0.3, 0.7], NUM_PDFS)),
                         3.0 * rng.normal(size=(len(pdf_G), D)), rng.uniform(0.5, 2.0, (len(pdf_G), D)))


def frames(of: StateMixtures, num: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Features and pdfs of frames drawn from mixtures."""
    rng = np.random.default_rng(seed)
    g_T = rng.integers(0, len(of.pdf_G), num)
    return of.mean_GD[g_T] + rng.normal(size=(num, D)) * np.sqrt(of.variance_GD[g_T]), of.pdf_G[g_T]


def stats_of(of: StateMixtures, x_TD: np.ndarray, pdf_T: np.ndarray) -> projections.FmllrStats:
    stats = projections.FmllrStats.zero(D)
    stats.add(x_TD, *of.precisions(x_TD, pdf_T))
    return stats


def depends_on_transform(stats: projections.FmllrStats, w_DE: np.ndarray) -> float:
    """The part of the log-likelihood that depends on the transform."""
    quadratic = np.einsum("de,def,df->", w_DE, stats.square_DEE, w_DE)
    volume = stats.count * np.linalg.slogdet(w_DE[:, :-1])[1]
    return float(volume + (w_DE * stats.linear_DE).sum() - 0.5 * quadratic)


def test_fmllr_reaches_the_maximum_of_the_density() -> None:
    of = mixtures()
    x_TD, pdf_T = frames(of, 60, 1)
    found = stats_of(of, x_TD, pdf_T).estimate()
    is_own = torch.from_numpy(of.pdf_G == pdf_T[:, None])
    joint_TG = torch.from_numpy(of.log_joint(x_TD)).masked_fill(~is_own, -np.inf)
    given = (torch.from_numpy(x_TD), list(torch.from_numpy(of.mean_GD)),
             list(torch.from_numpy(of.variance_GD)), joint_TG.softmax(dim=1))
    w_DE = torch.from_numpy(found).requires_grad_()
    value = reference.log_likelihood(w_DE, *given)
    value.backward()
    assert w_DE.grad is not None
    # ten passes of row updates; the likelihood per frame is flat to 1e-3 there
    assert float(w_DE.grad.abs().max()) / len(x_TD) < 1e-3
    start = torch.eye(D, D + 1, dtype=torch.float64)
    stats = stats_of(of, x_TD, pdf_T)
    gained = depends_on_transform(stats, found) - depends_on_transform(stats, start.numpy())
    expected = value.item() - reference.log_likelihood(start, *given).item()
    assert gained == pytest.approx(expected, rel=1e-9)
    assert gained > 0


def test_a_transform_undoes_the_distortion_of_a_speaker() -> None:
    of = mixtures()
    y_TD, pdf_T = frames(of, 4000, 2)
    distortion = np.array([[1.3, 0.2, 0.0], [-0.1, 0.8, 0.1], [0.0, 0.1, 1.1]])
    offset_D = np.array([0.5, -1.0, 0.2])
    x_TD = (y_TD - offset_D) @ np.linalg.inv(distortion).T
    w_DE = np.eye(D, D + 1)
    for _ in range(3):
        stats = projections.FmllrStats.zero(D)
        stats.add(x_TD, *of.precisions(projections.apply(w_DE, x_TD), pdf_T))
        w_DE = stats.estimate()
    # the standard error of a coefficient is about 1 / sqrt(4000)
    np.testing.assert_allclose(w_DE, np.column_stack([distortion, offset_D]), atol=0.1)


def test_sums_in_parts_are_those_of_all_frames() -> None:
    of = mixtures()
    x_TD, pdf_T = frames(of, 5000, 3)
    whole = stats_of(of, x_TD, pdf_T)
    parts = stats_of(of, x_TD[:1234], pdf_T[:1234]).plus(stats_of(of, x_TD[1234:], pdf_T[1234:]))
    assert parts.count == whole.count
    # the order of sums of 5000 float64 numbers
    for name in ("linear_DE", "square_DEE"):
        np.testing.assert_allclose(getattr(parts, name), getattr(whole, name), rtol=1e-9, atol=1e-9)


def test_log_likelihoods_of_pdfs_are_sums_over_their_gaussians() -> None:
    of = mixtures()
    x_TD, _ = frames(of, 7, 4)
    found = of.log_likelihood(x_TD)
    for t, x_D in enumerate(x_TD):
        for pdf in range(NUM_PDFS):
            own = of.pdf_G == pdf
            mean_GD, variance_GD = of.mean_GD[own], of.variance_GD[own]
            each_GD = (x_D - mean_GD) ** 2 / variance_GD + np.log(2 * np.pi * variance_GD)
            log_density = np.logaddexp.reduce(of.log_weight_G[own] - 0.5 * each_GD.sum(axis=1))
            # float32 results
            assert found[t, pdf] == pytest.approx(log_density, rel=1e-5)


def test_mixtures_are_fitted_for_every_pdf_with_and_without_frames() -> None:
    x_TD, pdf_T = frames(mixtures(), 2000, 5)
    found = gaussians.train(lambda: [(x_TD, np.where(pdf_T == 3, 2, pdf_T))], NUM_PDFS + 1, num_gaussians=20)
    assert found.num_pdfs == NUM_PDFS + 1
    # states with frames get several Gaussians, those without take the frames of all
    assert (np.bincount(found.pdf_G)[:3] > 1).all()
    np.testing.assert_allclose(found.mean_GD[found.pdf_G == 4], x_TD.mean(axis=0)[None], rtol=1e-9)


def test_the_projection_is_that_of_the_generalized_eigenproblem_then_mllt() -> None:
    rng = np.random.default_rng(6)
    class_T = rng.integers(0, 5, 2000)
    x_TS = rng.normal(size=(5, 6))[class_T] + rng.normal(size=(2000, 6)) @ rng.normal(size=(6, 6)) + 0.5
    cuts = [400, 700, 701, 1200]
    pieces = list(zip(np.split(x_TS, cuts), np.split(class_T, cuts), strict=True))
    # two classes without frames
    matrix_DS, mean_S = projections.projection(lambda: pieces, 7, 3)
    np.testing.assert_allclose(mean_S, x_TS.mean(axis=0), atol=1e-12)
    np.testing.assert_allclose((x_TS @ matrix_DS.T).std(axis=0), 1.0, rtol=1e-9)
    means = np.stack([x_TS[class_T == c].mean(axis=0) for c in range(5)])
    within = np.cov((x_TS - means[class_T]).T, bias=True)
    centered = means[class_T] - x_TS.mean(axis=0)
    between = centered.T @ centered / len(x_TS)
    values, vectors = np.linalg.eig(np.linalg.inv(within) @ between)
    best_SD = vectors.real[:, np.argsort(-values.real)[:3]]
    # MLLT rotates within the space of the best directions
    coefficients, *_ = np.linalg.lstsq(best_SD, matrix_DS.T, rcond=None)
    np.testing.assert_allclose(best_SD @ coefficients, matrix_DS.T, atol=1e-8)
    # of the sums in one product; the sign of a direction is arbitrary
    lda_DS = projections.lda(within, means - x_TS.mean(axis=0), np.bincount(class_T).astype(float), 3)
    np.testing.assert_allclose(lda_DS @ within @ lda_DS.T, np.eye(3), atol=1e-9)
    np.testing.assert_allclose(lda_DS @ between @ lda_DS.T, np.diag(np.sort(values.real)[::-1][:3]), atol=1e-9)


def test_mllt_makes_the_covariances_of_classes_diagonal() -> None:
    rng = np.random.default_rng(7)
    mixing = rng.normal(size=(4, 4))
    class_T = rng.integers(0, 6, 12000)
    deviation = rng.uniform(0.3, 3.0, (6, 4))
    x_TD = (rng.normal(size=(12000, 4)) * deviation[class_T]) @ mixing.T
    covariances = np.stack([np.cov(x_TD[class_T == c].T, bias=True) for c in range(6)])
    found = projections.mllt(covariances, np.bincount(class_T).astype(float))

    def correlation(y_TD: np.ndarray) -> float:
        by_class = (np.corrcoef(y_TD[class_T == c].T) for c in range(6))
        return float(np.mean([np.abs(one - np.eye(4)).max() for one in by_class]))
    # 2000 frames of a class leave correlations of about 1 / sqrt(2000)
    assert correlation(x_TD) > 0.3
    assert correlation(x_TD @ found.T) < 0.08


def utterances(seed: int, num_speakers: int = 6) -> tuple[list[np.ndarray], list[np.ndarray], list[str]]:
    """Features whose frames a speaker distorts, their pdfs, and the speakers."""
    rng = np.random.default_rng(seed)
    of, features, pdfs, who = mixtures(8), [], [], []
    for speaker in range(num_speakers):
        distortion = np.eye(D) + 0.25 * rng.normal(size=(D, D))
        for number in range(2):
            y_TD, pdf_T = frames(of, 400, 100 * speaker + number)
            features.append((y_TD @ distortion.T + rng.normal(size=D)).astype(np.float32))
            pdfs.append(pdf_T)
            who.append(f"s{speaker}")
    return features, pdfs, who


def always(pdf_T: np.ndarray) -> speakers.FindPath:
    """A first pass that finds these states."""
    return lambda _: pdf_T


def no_scores(features_TD: np.ndarray) -> np.ndarray:
    """A network for first passes that do not look at its scores."""
    return np.zeros((len(features_TD), NUM_PDFS), np.float32)


@functools.cache
def trained() -> tuple[SpeakerAdaptation, dict[str, np.ndarray], list[np.ndarray], list[np.ndarray]]:
    features, pdfs, who = utterances(9)
    plain = speakers.train_projection(features, np.concatenate(pdfs), context=0, dim=D, num_silence=1)
    z = {one: [plain.project(x) for x, w in zip(features, who, strict=True) if w == one] for one in who}
    of = {one: [p for p, w in zip(pdfs, who, strict=True) if w == one] for one in who}
    return *speakers.train_fmllr(plain, z, of, NUM_PDFS), features, pdfs


def test_adapted_frames_fit_their_states_better_than_projected_ones() -> None:
    found, _, features, pdfs = trained()
    for x_TD, pdf_T in zip(features[:4], pdfs[:4], strict=True):
        y_TD, stats = found.adapt(x_TD, None, always(pdf_T))
        assert stats is not None and found.first is not None and found.adapted is not None
        assert stats.count == (pdf_T >= 1).sum()
        loglik = [mix.log_likelihood(v)[np.arange(len(pdf_T)), pdf_T].mean()
                  for mix, v in ((found.first, found.project(x_TD)), (found.adapted, y_TD.astype(float)))]
        assert loglik[1] > loglik[0]


def test_a_network_that_knows_the_states_gives_the_transform_of_the_right_states() -> None:
    found, _, features, pdfs = trained()
    # the mixtures find any states at first
    shuffled = np.random.default_rng(0).permutation(NUM_PDFS)
    spoken, right = features[:2], pdfs[:2]
    z = [found.project(x_TD) for x_TD in spoken]
    asked: list[int] = []

    def scores(features_TD: np.ndarray) -> np.ndarray:
        at = len(asked) % 2
        asked.append(at)
        assert features_TD.shape == z[at].shape and features_TD.dtype == np.float32
        return np.asarray(100.0 * np.eye(NUM_PDFS, dtype=np.float32)[right[at]])

    def find_path(loglik_TP: np.ndarray) -> np.ndarray:
        best_T = loglik_TP.argmax(axis=1)
        return np.asarray(best_T if loglik_TP.max() == 100.0 else shuffled[best_T])
    adapted = np.concatenate(found.adapt_speaker(spoken, find_path, scores))
    first = found.transform_of(z, find_path)
    wrong = np.concatenate([projections.apply(first, z_TD) for z_TD in z])
    pdf_T = np.concatenate(right)
    assert found.adapted is not None
    of_right, of_wrong = (found.adapted.log_likelihood(y_TD.astype(float))[np.arange(len(pdf_T)), pdf_T].mean()
                          for y_TD in (adapted, wrong))
    assert of_right > of_wrong + 0.5
    # two rounds over both utterances
    assert asked == [0, 1, 0, 1]


def test_little_speech_moves_the_transform_little() -> None:
    found, _, features, pdfs = trained()
    none = found.transform(projections.FmllrStats.zero(D))
    few, many = (found.accumulated([found.project(features[0][:n])], None, always(pdfs[0][:n]))
                 for n in (5, 400))
    moved = [np.abs(found.transform(stats) - none).max() for stats in (few, many)]
    assert moved[0] < moved[1]


def test_arrays_give_the_adaptation_back() -> None:
    found, _, features, pdfs = trained()
    adapted = [one.adapt_speaker(features[:2], always(pdfs[0]), no_scores)
               for one in (found, SpeakerAdaptation.of_arrays(found.arrays(), NUM_PDFS))]
    for one, other in zip(*adapted, strict=True):
        np.testing.assert_array_equal(one, other)
    plain = replace(found, first=None, adapted=None, prior=None)
    assert SpeakerAdaptation.of_arrays(plain.arrays(), NUM_PDFS).prior is None


@pytest.mark.parametrize("name", sorted(trained()[0].arrays()))
def test_damaged_arrays_are_rejected(name: str) -> None:
    arrays = trained()[0].arrays()
    other_type = np.array([-1, 0]) if name == "context" else arrays[name].astype(np.float32)
    for damaged in (arrays[name][:-1], other_type):
        with pytest.raises((ValueError, IndexError)):
            SpeakerAdaptation.of_arrays({**arrays, name: damaged}, NUM_PDFS)


def test_a_projection_to_more_features_than_there_are_is_an_error() -> None:
    features, pdfs, _ = utterances(10, 1)
    with pytest.raises(DataError):
        speakers.train_projection(features, np.concatenate(pdfs), context=1, dim=20, num_silence=1)
