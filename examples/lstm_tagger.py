"""An LSTM that tags each character of Python source with its token type, trained by NGSGD and by
PyTorch's AdamW in the same loop.

NGSGD trains the linear layer with natural gradient; AdamW, inside NGSGD, trains the embedding and
the LSTM.

    python examples/lstm_tagger.py [STEPS]
"""
import argparse
import io
import sys
import tokenize

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ngsgd

CONTEXT, BATCH = 64, 16
TYPES = (tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP, tokenize.COMMENT)

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(128, 32)
        self.lstm = nn.LSTM(32, 64, batch_first=True, bidirectional=True)
        self.output = nn.Linear(128, len(TYPES) + 1)

    def forward(self, characters):
        return self.output(self.lstm(self.embedding(characters))[0])

def tagged_characters():
    """Windows of characters and their tags; 0 for white space."""
    with open(argparse.__file__, encoding="utf-8") as file:
        text = file.read()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    tags = torch.zeros(len(text), dtype=torch.long)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in TYPES:
            (line, column), (last_line, last_column) = token.start, token.end
            tags[starts[line - 1] + column:starts[last_line - 1] + last_column] = 1 + TYPES.index(token.type)
    characters = torch.tensor([min(ord(c), 127) for c in text])
    num = len(text) // CONTEXT * CONTEXT
    return characters[:num].view(-1, CONTEXT), tags[:num].view(-1, CONTEXT)

def train(make_optimizer, num_steps):
    """The loss on the windows that are held out."""
    torch.manual_seed(0)
    characters, tags = tagged_characters()
    is_train = torch.arange(len(tags)) % 10 > 0
    model = Tagger()
    optimizer = make_optimizer(model)
    for _ in range(num_steps):
        rows = torch.randint(int(is_train.sum()), (BATCH,))
        optimizer.zero_grad()
        logits = model(characters[is_train][rows])
        cross_entropy(logits.flatten(0, 1), tags[is_train][rows].flatten()).backward()
        optimizer.step()
    with torch.no_grad():
        return float(cross_entropy(model(characters[~is_train]).flatten(0, 1), tags[~is_train].flatten()))

if __name__ == "__main__":
    steps = int(sys.argv[1]) if sys.argv[1:] else 300
    print(f"NGSGD: valid loss {train(lambda model: ngsgd.NGSGD(model, fallback='adamw'), steps):.3f}")
    print(f"AdamW: valid loss {train(lambda model: torch.optim.AdamW(model.parameters(), 2e-3), steps):.3f}")
