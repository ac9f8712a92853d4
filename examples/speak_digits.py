"""Write a recording of digits, spoken by espeak-ng over a little noise, to try a model with.

    python examples/speak_digits.py recording.wav four two nine zero      (needs ngsgd[asr,synth])
"""
import argparse

import numpy as np
import soundfile

from ngsgd.asr.corpora.digits import Sentence, speak

VOICE, WORDS_PER_MINUTE, PITCH, PITCH_RANGE, GAP_10_MS = "gmw/en-US", 160, 50, 50, 10
NOISE_DB = 20.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="wav file to write")
    parser.add_argument("words", nargs="+", help="words to speak")
    options = parser.parse_args()
    path, words = options.path, options.words
    sentence = Sentence(" ".join(words), VOICE, WORDS_PER_MINUTE, PITCH, PITCH_RANGE, GAP_10_MS)
    (spoken,) = speak([sentence], seed=0)
    speech = spoken.samples / 2**15
    pause = np.zeros(spoken.sample_rate // 2)
    samples = np.concatenate([pause, speech, pause])
    # training recordings have noise; digital silence is outside of what a model has seen
    level = np.sqrt(np.mean(speech**2)) * 10 ** (-NOISE_DB / 20)
    noise = np.random.default_rng(0).normal(scale=level, size=len(samples))
    soundfile.write(path, samples + noise, spoken.sample_rate)
    print(f"{path}: {len(samples) / spoken.sample_rate:.1f} s, {' '.join(words)}")


if __name__ == "__main__":
    main()
