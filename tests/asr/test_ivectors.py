"""Background model, extractor and online extraction, against dense Gaussians and loops."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ngsgd.asr import speech_set
from ngsgd.asr.features import cmvn
from ngsgd.asr.ivectors import extractor as extractors
from ngsgd.asr.ivectors import model as files
from ngsgd.asr.ivectors import training
from ngsgd.asr.ivectors.extractor import Extractor, Statistics
from ngsgd.asr.ivectors.model import DiagonalMixture, FrontEnd, IvectorModel, IvectorStream
from ngsgd.asr.ivectors.training import SpeakerMemory, extract, train
from ngsgd.asr.utterance import FramedUtterance
from ngsgd.config import FeatureConfig, IvectorConfig
from ngsgd.errors import DataError
from tests.reference import ivectors as reference

NUM_GAUSSIANS, DIM, IVECTOR_DIM, OFFSET = 3, 4, 3, 5.0
RANDOM = np.random.default_rng(0)


def random_extractor(seed: int = 0) -> Extractor:
    random = np.random.default_rng(seed)
    root = random.normal(size=(NUM_GAUSSIANS, DIM, DIM))
    covariance = root @ root.transpose(0, 2, 1) + np.eye(DIM)
    return Extractor(torch.from_numpy(random.normal(size=(NUM_GAUSSIANS, DIM, IVECTOR_DIM))), torch.from_numpy(covariance), OFFSET)


def utterances(number: int = 40, frames: int = 12) -> list[tuple[np.ndarray, list[int]]]:
    """(frames, which Gaussian each is of), drawn from some extractor."""
    made, source = [], random_extractor(7)
    for _ in range(number):
        x_S = RANDOM.normal(size=IVECTOR_DIM) + OFFSET * np.eye(IVECTOR_DIM)[0]
        gaussian_T = RANDOM.integers(NUM_GAUSSIANS, size=frames).tolist()
        made.append((np.array([RANDOM.multivariate_normal(source.M_IDS[i].numpy() @ x_S, source.covariance_IDD[i].numpy())
                               for i in gaussian_T]), gaussian_T))
    return made


def statistics(made: list[tuple[np.ndarray, list[int]]], weight: float = 1.0) -> Statistics:
    count, first = np.zeros((len(made), NUM_GAUSSIANS)), np.zeros((len(made), NUM_GAUSSIANS, DIM))
    second = np.zeros((NUM_GAUSSIANS, DIM, DIM))
    for u, (frames_TD, gaussian_T) in enumerate(made):
        for frame_D, i in zip(frames_TD, gaussian_T, strict=True):
            count[u, i] += weight
            first[u, i] += weight * frame_D
            second[i] += weight * np.outer(frame_D, frame_D)
    return Statistics(*map(torch.from_numpy, (count, first, second)))


def test_densities_and_pruned_posteriors_are_their_definitions() -> None:
    mixture = DiagonalMixture(torch.tensor([0.2, 0.5, 0.3]).double(), torch.randn(3, 4).double(), torch.rand(3, 4).double() + 0.1)
    x_ND = torch.randn(20, 4).double()
    arrays = mixture.weight_G.numpy(), mixture.mean_GD.numpy(), mixture.variance_GD.numpy()
    expected = np.array([reference.log_density(x_D, *arrays) for x_D in x_ND.numpy()])
    np.testing.assert_allclose(mixture.log_joint(x_ND), expected, rtol=1e-12)
    pruned = np.array([reference.pruned_posterior(log_I, 2, 0.1) for log_I in expected])
    np.testing.assert_allclose(mixture.posteriors(x_ND, num_gselect=2, min_post=0.1), pruned, atol=1e-12)


def test_mixing_up_describes_clusters_as_well_as_they_can_be() -> None:
    centres = torch.tensor([[0.0] * 10, [9.0] * 10, [0.0, 5.0] * 5, [-6.0, 3.0] * 5]).double()
    x_ND = torch.cat([centre + torch.randn(200, 10, generator=torch.Generator().manual_seed(k))
                      for k, centre in enumerate(centres)])
    truth = DiagonalMixture(torch.full((4,), 0.25).double(), centres, torch.ones_like(centres))
    found = training.train_mixture(x_ND, 8)  # with four, two of them may sit on one cluster forever
    assert float(found.log_joint(x_ND).logsumexp(dim=1).mean()) > float(truth.log_joint(x_ND).logsumexp(dim=1).mean())
    assert len(found.weight_G) == 8 and float(torch.cdist(centres, found.mean_GD).min(dim=1).values.max()) < 1.5


def test_few_frames_make_few_gaussians() -> None:
    mixture = training.train_mixture(torch.randn(60, 2, generator=torch.Generator().manual_seed(0)), 64)
    assert 1 <= len(mixture.weight_G) <= 6


@pytest.mark.parametrize("weight", [1.0, 0.1])
def test_the_posterior_is_the_conditional_of_the_joint_gaussian(weight: float) -> None:
    extractor, made = random_extractor(), utterances(4)
    found = statistics(made, weight)
    mean_US, covariance_USS, _ = extractor.posterior(found.count_UI, found.first_UID)
    for u, (frames_TD, gaussian_T) in enumerate(made):
        mean_S, covariance_SS = reference.posterior(extractor.M_IDS.numpy(), extractor.covariance_IDD.numpy(),
                                                    OFFSET * np.eye(IVECTOR_DIM)[0], frames_TD, gaussian_T,
                                                    [weight] * len(frames_TD))
        np.testing.assert_allclose(mean_US[u], mean_S, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(covariance_USS[u], covariance_SS, rtol=1e-9, atol=1e-9)


def exact_log_likelihood(extractor: Extractor, made: list[tuple[np.ndarray, list[int]]]) -> float:
    return sum(reference.log_likelihood(extractor.M_IDS.numpy(), extractor.covariance_IDD.numpy(),
                                        extractor.prior_offset * np.eye(IVECTOR_DIM)[0], np.eye(IVECTOR_DIM), *one) for one in made)


def test_the_likelihood_is_that_of_the_large_gaussian_and_no_pass_lowers_it() -> None:
    made = utterances()
    found = statistics(made)
    extractor = extractors.start(found, IVECTOR_DIM)
    likelihoods = [exact_log_likelihood(extractor, made)]
    for _ in range(8):
        extractor, log_likelihood = extractors.em_pass(extractor, found, variance_floor=0.0, fewest_frames=0.0)
        np.testing.assert_allclose(log_likelihood * 12 * len(made), likelihoods[-1], rtol=1e-9)
        likelihoods.append(exact_log_likelihood(extractor, made))
    assert (np.diff(likelihoods) > 0.0).all() and likelihoods[-1] > likelihoods[0] + 10.0


def test_a_standard_prior_describes_the_same_speech() -> None:
    extractor, made = random_extractor(), utterances(3)
    mean_S = np.array([-1.0, 2.0, 0.5])
    root = RANDOM.normal(size=(IVECTOR_DIM, IVECTOR_DIM))
    covariance_SS = root @ root.T + np.eye(IVECTOR_DIM)
    standard = extractors.with_standard_prior(extractor, torch.from_numpy(mean_S), torch.from_numpy(covariance_SS))
    before = sum(reference.log_likelihood(extractor.M_IDS.numpy(), extractor.covariance_IDD.numpy(), mean_S, covariance_SS, *one)
                 for one in made)
    assert standard.prior_offset > 0.0
    assert exact_log_likelihood(standard, made) == pytest.approx(before, rel=1e-9)


def test_the_floor_raises_only_smaller_values() -> None:
    count = torch.tensor([10.0, 30.0]).double()
    raw = torch.stack([torch.diag(torch.tensor([1e-6, 4.0])), torch.diag(torch.tensor([4.0, 4.0]))]).double()
    found = extractors.floored(raw, count, 0.1)
    # Cholesky of 1e-10 more
    np.testing.assert_allclose(found[0].diagonal(), [0.1 * (1e-6 * 10 + 4.0 * 30) / 40, 4.0], rtol=1e-6)
    np.testing.assert_allclose(found[1], raw[1], atol=1e-9)


CONFIG = IvectorConfig(dim=IVECTOR_DIM, period=4)
RAW_DIM = 2
ALL_SPEECH = cmvn.statistics(RANDOM.normal(1.0, 2.0, size=(50, RAW_DIM)))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that matter in utterances of 26 frames."""
    for module, names in ((cmvn, {"WINDOW": 9, "SPEAKER_FRAMES": 5, "GLOBAL_FRAMES": 3}),
                          (files, {"CONTEXT": 1, "NUM_GSELECT": 2, "MIN_POST": 0.05,
                                   "MAX_REMEMBERED_FRAMES": 30.0, "MAX_COUNT": 1.5})):
        for name, value in names.items():
            monkeypatch.setattr(module, name, value)


def online_model(config: IvectorConfig = CONFIG) -> IvectorModel:
    random = np.random.default_rng(3)
    axes = torch.from_numpy(random.normal(size=(RAW_DIM * (2 * files.CONTEXT + 1), DIM)))
    mixture = DiagonalMixture(torch.tensor([0.3, 0.3, 0.4]).double(), torch.from_numpy(random.normal(size=(NUM_GAUSSIANS, DIM))),
                              torch.from_numpy(random.uniform(5.0, 9.0, size=(NUM_GAUSSIANS, DIM))))
    return IvectorModel(FrontEnd(config, ALL_SPEECH, axes), mixture, random_extractor())


def by_loops(model: IvectorModel, said: list[np.ndarray]) -> list[np.ndarray]:
    """The i-vectors of a speaker's utterances in turn."""
    config, mixture, extractor = model.front.config, model.ubm, model.extractor
    count_I, first_ID = np.zeros(NUM_GAUSSIANS), np.zeros((NUM_GAUSSIANS, DIM))
    found = []
    for number, frames_TD in enumerate(said):
        means = reference.running_means(frames_TD, window=9, before=said[:number], most_before=5,
                                        global_mean_D=ALL_SPEECH[0, :-1] / ALL_SPEECH[0, -1], most_global=3)
        rows = []
        for t in range(len(frames_TD)):
            normal_D, raw_D = (reference.spliced(one, t, files.CONTEXT) @ model.front.axes_CK.numpy()
                               for one in (frames_TD - means, frames_TD))
            log_I = reference.log_density(normal_D, mixture.weight_G.numpy(), mixture.mean_GD.numpy(), mixture.variance_GD.numpy())
            post_I = files.POSTERIOR_SCALE * reference.pruned_posterior(log_I, files.NUM_GSELECT, files.MIN_POST)
            count_I, first_ID = count_I + post_I, first_ID + np.outer(post_I, raw_D)
            if t % config.period == 0:
                rows.append(reference.estimate(extractor.M_IDS.numpy(), extractor.covariance_IDD.numpy(), OFFSET, count_I, first_ID,
                                               files.MAX_COUNT))
        share = min(1.0, files.MAX_REMEMBERED_FRAMES * files.POSTERIOR_SCALE / count_I.sum())
        count_I, first_ID = share * count_I, share * first_ID
        found.append(np.array(rows))
    return found


SAID = [RANDOM.normal(size=(length, RAW_DIM)) for length in (26, 9, 1, 33)]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("step", [1, 3, 100])
def test_online_extraction_is_that_of_loops_over_frames(step: int) -> None:
    model, before = online_model(), None
    for frames_TD, expected in zip(SAID, by_loops(online_model(), SAID), strict=True):
        stream = IvectorStream(model, before)
        for at in range(0, len(frames_TD), step):
            stream.accept(frames_TD[at:at + step].astype(np.float64))
        before = stream.finish()
        # rows are float32
        np.testing.assert_allclose(stream.rows(), expected, rtol=1e-5, atol=1e-5)
        time_T = np.arange(len(frames_TD))
        np.testing.assert_array_equal(stream.at(time_T), stream.rows()[time_T // CONFIG.period])


@pytest.mark.usefixtures("small")
def test_an_ivector_uses_no_more_lookahead_than_the_context() -> None:
    model, changed = online_model(), SAID[3].copy()
    changed[18:] += 1.0
    rows = []
    for frames_TD in (SAID[3], changed):
        stream = IvectorStream(model)
        stream.accept(frames_TD)
        stream.finish()
        rows.append(stream.rows())
    # number 4 is estimated at frame 16, which sees 17
    np.testing.assert_array_equal(rows[0][:5], rows[1][:5])
    assert not np.allclose(rows[0][5:], rows[1][5:], atol=1e-3)


@pytest.mark.usefixtures("small")
def test_an_ivector_is_known_as_soon_as_its_context_is() -> None:
    stream = IvectorStream(online_model())
    known = []
    for t in range(12):
        stream.accept(SAID[0][t:t + 1])
        known.append(len(stream._rows))
    assert known == [0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3]


@pytest.mark.usefixtures("small")
def test_at_the_end_without_limits_it_is_the_posterior_of_the_utterance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_COUNT", 1e9)
    model = online_model(replace(CONFIG, period=1))
    stream = IvectorStream(model)
    stream.accept(SAID[0])
    stream.finish()
    mean = model.front.mean(None).accept(SAID[0])
    z_TK, raw_TK = (model.front.project(one, np.arange(26)) for one in (SAID[0] - mean, SAID[0]))
    post_TI = files.scaled_posteriors(model.ubm, z_TK)
    mean_US, _, _ = model.extractor.posterior(post_TI.sum(dim=0)[None], (post_TI.T @ raw_TK)[None])
    # float32
    np.testing.assert_allclose(stream.rows()[-1], mean_US[0] - OFFSET * torch.eye(IVECTOR_DIM)[0], rtol=1e-5, atol=1e-5)


def test_speakers_are_remembered_over_so_many_utterances() -> None:
    turns: SpeakerMemory[int] = SpeakerMemory(2)
    seen = []
    for number in range(5):
        seen.append(turns.before("a"))
        turns.after("a", number)
    assert seen == [None, 0, None, 2, None] and turns.before("b") is None
    for_ever: SpeakerMemory[int] = SpeakerMemory(0)
    for_ever.after("a", 1)
    assert for_ever.before("a") == 1


SMALL = IvectorConfig(dim=2, num_gaussians=4)


def speech_of_two() -> speech_set.SpeechSet:
    """Sixteen utterances; one speaker's features lie 1 higher than the other's, in every sound."""
    random, sounds = np.random.default_rng(0), np.array([[0.0, 0.0, 0.0], [5.0, 0.0, -5.0], [0.0, 6.0, 3.0]])
    said = []
    for number in range(16):
        speaker = "ab"[number % 2]
        frames_TD = sounds[np.repeat(random.integers(3, size=30), 5)] + 0.5 * random.normal(size=(150, 3)) + (speaker == "b")
        said.append(FramedUtterance(f"u{number}", speaker, ("A",), frames_TD.astype(np.float32), np.zeros(150, np.int32)))
    return speech_set.assemble(said, FeatureConfig(cmvn="none"))


def test_a_trained_extractor_separates_speakers_after_mean_removal(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # few numbers, for speed
    monkeypatch.setattr(files, "CONTEXT", 1)
    monkeypatch.setattr(files, "POSTERIOR_SCALE", 1.0)
    monkeypatch.setattr(training, "PCA_DIM", 4)
    speech = speech_of_two()
    model = train(speech, SMALL, lambda _: None)
    rows = list(extract(speech, model, most_utterances=1))
    assert [len(one) for one in rows] == [15] * 16
    a, b = (np.array([one[-1] for one in rows[first::2]]) for first in (0, 1))
    spread_S = np.maximum(a.std(axis=0), b.std(axis=0))
    # one dimension is the speaker, another may not be
    assert (np.abs(a.mean(axis=0) - b.mean(axis=0)) / spread_S).max() > 8.0
    again = train(speech, SMALL, lambda _: None)
    files.write(model, tmp_path / "one")
    files.write(again, tmp_path / "other")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
    kept = files.read(tmp_path / "one", SMALL)
    np.testing.assert_array_equal(list(extract(speech, kept, most_utterances=1))[3], rows[3])


def test_gaussians_with_few_frames_are_ignored_and_too_many_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    found = statistics(utterances())
    rare = replace(found, count_UI=found.count_UI * torch.tensor([1.0, 1.0, 0.01]), first_UID=found.first_UID * torch.tensor(
        [1.0, 1.0, 0.01])[:, None], second_IDD=found.second_IDD * torch.tensor([1.0, 1.0, 0.01])[:, None, None])
    extractor, _ = extractors.em_pass(extractors.start(rare, IVECTOR_DIM), rare)
    direction_IDS = extractor.M_IDS - extractor.M_IDS.mean(dim=2, keepdim=True)
    # its mean, along the transformed offset
    assert np.linalg.matrix_rank(extractor.M_IDS[2].numpy()) == 1
    assert np.linalg.matrix_rank(direction_IDS[0].numpy()) > 1
    monkeypatch.setattr(files, "POSTERIOR_SCALE", 1e-4)
    with pytest.raises(DataError, match=r"num_gaussians.*4.*1000000 frames"):
        train(speech_of_two(), SMALL, lambda _: None)


def test_a_missing_file_or_wrong_dimension_is_reported(tmp_path: Path) -> None:
    files.write(online_model(), tmp_path / "good")
    with pytest.raises(DataError, match=r"3 dimensions.*ivectors.dim.*5"):
        files.read(tmp_path / "good", replace(CONFIG, dim=5))
    (tmp_path / "bad").write_bytes((tmp_path / "good").read_bytes()[:100])
    with pytest.raises(DataError, match="i-vector"):
        files.read(tmp_path / "bad", CONFIG)
