"""The text and the model of `train_text.py`; nothing in here knows that training is elastic.

Both are fixed by the Python version and the seed: no download, no dropout, no threads.
"""

from __future__ import annotations

import ctypes
import hashlib
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

CONTEXT = 64
"""Bytes that the model sees at once."""

TEXT_SHA256 = "2a95af4ac93f5b719944030ce3769070ddf827d847cba42192afa8da989e5dc4"
"""Of the text in Python 3.11.7; each release of Python has its own."""


def read_text() -> tuple[bytes, bool]:
    """Python's own documentation (about 460 kB), and whether it is that of Python 3.11.7."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    return text, hashlib.sha256(text).hexdigest() == TEXT_SHA256


class Windows(Dataset[Tensor]):
    """The text as windows of CONTEXT + 1 bytes, indexed by lists: n indices give n x 65 int64."""

    def __init__(self, text: bytes, samples: int) -> None:
        whole = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.windows = whole.unfold(0, CONTEXT + 1, CONTEXT)[:samples]

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, indices: list[int]) -> Tensor:
        return self.windows[torch.tensor(indices, dtype=torch.int64)]


class Block(nn.Module):
    """Attention to what came before, then a perceptron, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        wide, narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(wide, nn.GELU(), narrow)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(n, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(n, length, width))
        added: Tensor = x + self.mlp(self.before_mlp(x))
        return added


class ByteTransformer(nn.Module):
    """Bytes (n x length) to logits of each next byte (n x length x 256); 137,216 weights."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1])
        logits: Tensor = self.head(self.blocks(self.byte(text) + self.place(places)))
        return logits


def sha256_of(model: nn.Module) -> str:
    """Equal for two models only if their weights are bitwise equal."""
    digest = hashlib.sha256()
    for weights in model.state_dict().values():
        plain = weights.detach().cpu().contiguous()
        digest.update(ctypes.string_at(plain.data_ptr(), plain.nbytes))
    return digest.hexdigest()
