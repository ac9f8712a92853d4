"""Recognizes audio with an exported model, without ngsgd.

    ngsgd export --format onnx RUN model.onnx      # also writes model.fst, the decoding graph
    python examples/onnx_recognizer.py model.onnx recording.wav ...

Settings come from the model's metadata. Network and search run in chunks, as for live audio.
Letters: T frames, D feature dimension, P pdfs.
"""

import json
import sys
from pathlib import Path

import kaldi_native_fbank as knf
import numpy as np
import onnxruntime
import soundfile
import soxr

# this one first: the other takes its graphs
import kaldifst  # isort: skip
import kaldi_decoder  # isort: skip

CHUNK_FRAMES = 10


def features(samples, about):
    """T x D, normalized."""
    settings = about["features"]
    options = knf.MfccOptions() if settings["kind"] == "mfcc" else knf.FbankOptions()
    options.frame_opts.samp_freq = settings["sample_rate_hz"]
    options.frame_opts.dither, options.frame_opts.snip_edges = 0.0, False
    options.mel_opts.num_bins = settings["num_mel_bins"]
    if settings["kind"] == "mfcc":
        options.num_ceps, options.use_energy = settings["num_ceps"], False
    stream = knf.OnlineMfcc(options) if settings["kind"] == "mfcc" else knf.OnlineFbank(options)
    stream.accept_waveform(settings["sample_rate_hz"], samples * settings["sample_range"])
    stream.input_finished()
    x_TD = np.stack([stream.get_frame(t) for t in range(stream.num_frames_ready)])
    if about["cmvn"]["unit"] == "utterance":
        x_TD = (x_TD - x_TD.mean(0)) / np.maximum(x_TD.std(0), about["cmvn"]["min_deviation"])
    elif about["cmvn"]["unit"] != "none":
        sys.exit(f"this script has no normalization per {about['cmvn']['unit']}: train with features.cmvn=utterance")
    return x_TD.astype(np.float32)


def recognize(session, graph, about, x_TD):
    """The words of one utterance."""
    left, right = about["left_context"], about["right_context"]
    padded = np.concatenate([x_TD[:1]] * left + [x_TD] + [x_TD[-1:]] * right)
    options = kaldi_decoder.FasterDecoderOptions(beam=16.0, max_active=7000)
    decoder = kaldi_decoder.FasterDecoder(graph, options)
    decoder.init_decoding()
    for begin in range(0, len(x_TD), CHUNK_FRAMES):
        end = min(begin + CHUNK_FRAMES, len(x_TD))
        frames = padded[None, begin:end + left + right]
        loglik_TP = session.run(["loglik"], {"frames": frames})[0][0]
        scaled = np.ascontiguousarray(about["acoustic_scale"] * loglik_TP, np.float32)
        decoder.advance_decoding(kaldi_decoder.DecodableCtc(scaled, begin))
    found, path = decoder.get_best_path()
    labels = kaldifst.get_linear_symbol_sequence(path)[2] if found else []
    return [about["words"][label - 1] for label in labels]


def main(model, *recordings):
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    # strings: texts as they are, everything else as JSON
    metadata = session.get_modelmeta().custom_metadata_map
    names = ("features", "cmvn", "left_context", "right_context", "words", "acoustic_scale")
    about = {name: json.loads(metadata[name]) for name in names}
    graph = kaldifst.StdVectorFst.read(str(Path(model).with_suffix(".fst")))
    for recording in recordings:
        samples, rate = soundfile.read(recording, dtype="float32")
        assert samples.ndim == 1, f"{recording} must have one channel"
        samples = soxr.resample(samples, rate, about["features"]["sample_rate_hz"])
        print(recording, *recognize(session, graph, about, features(samples, about)))


if __name__ == "__main__":
    main(*sys.argv[1:])
