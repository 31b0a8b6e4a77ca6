"""Networks of sequences: recurrences, scans, attention, convolutions over time, structured outputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class MatrixLstm(nn.Module):
    """xLSTM's mLSTM cell, step by step, with a stabilized exponential gate."""

    def __init__(self, width=6):
        super().__init__()
        self.qkv, self.gates, self.out = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, 2),
            nn.Linear(width, width),
        )

    def forward(self, x):
        b, length, d = x.shape
        q, k, v = self.qkv(x).chunk(3, -1)
        i, f = self.gates(x).unbind(-1)
        c, n, m = x.new_zeros(b, d, d), x.new_zeros(b, d), x.new_zeros(b)
        outputs = []
        for t in range(length):
            log_f = F.logsigmoid(f[:, t])
            new = torch.maximum(log_f + m, i[:, t])
            keep, add = torch.exp(log_f + m - new), torch.exp(i[:, t] - new)
            m = new
            kt = k[:, t] / d**0.5
            c = keep[:, None, None] * c + add[:, None, None] * v[:, t, :, None] * kt[:, None, :]
            n = keep[:, None] * n + add[:, None] * kt
            h = torch.einsum("bij,bj->bi", c, q[:, t])
            outputs.append(h / torch.maximum((n * q[:, t]).sum(-1).abs(), torch.exp(-m))[:, None])
        return self.out(torch.stack(outputs, 1))


class ScalarLstm(nn.Module):
    """xLSTM's sLSTM with memory mixing."""

    def __init__(self, width=6):
        super().__init__()
        self.w, self.r = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width, bias=False)
        self.norm = nn.GroupNorm(2, width)

    def forward(self, x):
        b, length, d = x.size()
        h = c = n = m = torch.zeros(b, d, device=x.device)
        result = torch.empty(b, length, d)
        for t in range(length):
            z, i, f, o = (self.w(x[:, t]) + self.r(h)).chunk(4, 1)
            new = torch.maximum(f + m, i)
            i, f, m = torch.exp(i - new), torch.exp(f + m - new), new
            c = f * c + i * torch.tanh(z)
            n = f * n + i
            h = torch.sigmoid(o) * c / n
            result[:, t] = h
        return self.norm(result.reshape(b * length, d)).view(b, length, d)


class Mamba(nn.Module):
    """A selective scan written as a loop."""

    def __init__(self, width=6, states=4):
        super().__init__()
        self.inner = nn.Linear(width, 2 * width)
        self.conv = nn.Conv1d(width, width, 3, padding=2, groups=width)
        self.x, self.dt = nn.Linear(width, 2 * states + 1), nn.Linear(1, width)
        self.a_log = nn.Parameter(torch.log(torch.arange(1, states + 1).float().repeat(width, 1)))
        self.d, self.out, self.states = nn.Parameter(torch.ones(width)), nn.Linear(width, width), states

    def forward(self, tokens):
        u, z = self.inner(tokens).chunk(2, -1)
        length = u.shape[1]
        u = F.silu(self.conv(u.transpose(1, 2))[..., :length].transpose(1, 2))
        dt, b, c = torch.split(self.x(u), [1, self.states, self.states], -1)
        dt, a = F.softplus(self.dt(dt)), -torch.exp(self.a_log)
        decay = torch.exp(dt.unsqueeze(-1) * a)
        add = dt.unsqueeze(-1) * b.unsqueeze(2) * u.unsqueeze(-1)
        h, ys = torch.zeros_like(add[:, 0]), []
        for t in range(length):
            h = decay[:, t] * h + add[:, t]
            ys.append((h * c[:, t, None]).sum(-1))
        return self.out((torch.stack(ys, 1) + u * self.d) * F.silu(z))


class Mamba2(nn.Module):
    """State space duality: chunks through segment sums."""

    def __init__(self, width=4, states=3, chunk=4):
        super().__init__()
        self.project, self.states, self.chunk = nn.Linear(width, width + 2 * states + 1), states, chunk
        self.a = nn.Parameter(torch.zeros(1))

    @staticmethod
    def segsum(x):
        t = x.size(-1)
        x = x.unsqueeze(-1).expand(*x.shape, t)
        lower = torch.tril(torch.ones(t, t, dtype=torch.bool), -1)
        total = torch.cumsum(x.masked_fill(~lower, 0), -2)
        return total.masked_fill(~torch.tril(torch.ones(t, t, dtype=torch.bool)), -torch.inf)

    def forward(self, x):
        b, length, d = x.shape
        v, k, q, dt = torch.split(self.project(x), [d, self.states, self.states, 1], -1)
        dt = F.softplus(dt)
        a = (-torch.exp(self.a) * dt).view(b, -1, self.chunk)
        v, k, q = (t.view(b, -1, self.chunk, t.size(-1)) for t in (v * dt, k, q))
        within = torch.exp(self.segsum(a))
        y = torch.einsum("bcls,bcln,bcsn,bcsd->bcld", within, q, k, v)
        cumulative = a.cumsum(-1)
        states = torch.einsum("bcln,bcl,bcld->bcnd", k, torch.exp(cumulative[..., -1:] - cumulative), v)
        states = torch.cat([torch.zeros_like(states[:, :1]), states], 1)
        across = torch.exp(self.segsum(F.pad(cumulative[..., -1], (1, 0))))
        states = torch.einsum("bzc,bcnd->bznd", across, states)[:, :-1]
        y = y + torch.einsum("bcln,bcnd,bcl->bcld", q, states, torch.exp(cumulative))
        return y.reshape(b, length, d)


class Rwkv(nn.Module):
    """Time mixing with token shift."""

    def __init__(self, width=6):
        super().__init__()
        self.decay, self.first = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(width))
        self.mix = nn.Parameter(torch.rand(3, width))
        self.k, self.v, self.r = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x):
        before = F.pad(x, (0, 0, 1, -1))
        k, v, r = (f(x * m + before * (1 - m)) for f, m in zip((self.k, self.v, self.r), self.mix))
        w = -torch.exp(self.decay)
        top, bottom, most = (
            torch.zeros_like(x[:, 0]),
            torch.zeros_like(x[:, 0]),
            torch.full_like(x[:, 0], -1e38),
        )
        out = []
        for t in range(x.size(1)):
            kt, vt = k[:, t], v[:, t]
            p = torch.maximum(most, self.first + kt)
            one, two = torch.exp(most - p), torch.exp(self.first + kt - p)
            out.append((one * top + two * vt) / (one * bottom + two))
            p = torch.maximum(most + w, kt)
            one, two = torch.exp(most + w - p), torch.exp(kt - p)
            top, bottom, most = one * top + two * vt, one * bottom + two, p
        return torch.sigmoid(r) * torch.stack(out, 1)


class Packed(nn.Module):
    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.embed = nn.Embedding(20, 5, padding_idx=0)
        self.rnn = kind(5, 4, batch_first=True, bidirectional=True)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens, lengths):
        packed = pack_padded_sequence(self.embed(tokens), lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=tokens.size(1))
        return self.head(out.sum(1) / lengths.unsqueeze(1))


class Cells(nn.Module):
    """An LSTMCell and a GRUCell in a loop with attention over what came before."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.out = nn.LSTMCell(3, 6), nn.GRUCell(6, 6), nn.Linear(12, 2)

    def forward(self, x):
        h, c = x.new_zeros(x.size(0), 6), x.new_zeros(x.size(0), 6)
        g, past, results = x.new_zeros(x.size(0), 6), [], []
        for step in x.unbind(1):
            h, c = self.one(step, (h, c))
            g = self.two(h, g)
            past.append(g)
            memory = torch.stack(past, 1)
            weights = torch.softmax((memory * h.unsqueeze(1)).sum(-1), -1)
            results.append(self.out(torch.cat([g, (weights.unsqueeze(-1) * memory).sum(1)], -1)))
        return torch.stack(results, 1)


class ConvLstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.gates, self.out = nn.Conv2d(1 + 4, 16, 3, padding=1), nn.Conv2d(4, 1, 1)

    def forward(self, frames):
        b, t, _, height, width = frames.shape
        h = c = torch.zeros(b, 4, height, width)
        for i in range(t):
            i_, f, o, g = self.gates(torch.cat([frames[:, i], h], 1)).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i_) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return self.out(h)


class Tcn(nn.Module):
    """Causal, dilated convolutions with weight norm."""

    def __init__(self):
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.layers = nn.ModuleList(norm(nn.Conv1d(c, 6, 3, dilation=2**i)) for i, c in enumerate((2, 6, 6)))
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            y = F.relu(layer(F.pad(x, (2 * 2**i, 0))))
            x = y if i == 0 else x + y
        return self.head(x[..., -1])


class WaveNet(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.dilated = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=2**i) for i in range(3))
        self.skip = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(3))
        self.out = nn.Conv1d(width, 16, 1)

    def forward(self, codes):
        x, total = self.embed(codes).mT, 0
        for i, (conv, skip) in enumerate(zip(self.dilated, self.skip)):
            a, b = conv(F.pad(x, (2**i, 0))).chunk(2, 1)
            y = skip(torch.tanh(a) * torch.sigmoid(b))
            x, total = x + y, total + y
        return F.cross_entropy(self.out(F.relu(total))[:, :, :-1], codes[:, 1:])


class MaskedEncoder(nn.Module):
    """nn.TransformerEncoder with a padding mask."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        for part in layer.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        layer.self_attn.dropout = 0.0
        self.embed, self.encoder = nn.Embedding(20, 8, padding_idx=0), nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens):
        padding = tokens == 0
        x = self.encoder(self.embed(tokens), src_key_padding_mask=padding)
        x = x.masked_fill(padding.unsqueeze(-1), 0.0)
        return self.head(x.sum(1) / (~padding).sum(1, keepdim=True))


class Gpt(nn.Module):
    """Rotary positions, grouped queries, RMS norm, SwiGLU, tied weights, the loss inside."""

    def __init__(self, width=8, vocabulary=20):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.q, self.kv = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.n1, self.n2, self.n3 = nn.RMSNorm(width), nn.RMSNorm(width), nn.RMSNorm(width)
        self.up, self.gate, self.down = nn.Linear(width, 16), nn.Linear(width, 16), nn.Linear(16, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    @staticmethod
    def rotate(x):
        half = x.shape[-1] // 2
        angle = torch.outer(torch.arange(x.shape[-2]).float(), 10000.0 ** (-torch.arange(half) / half))
        one, two = x.chunk(2, -1)
        return torch.cat([one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()], -1)

    def forward(self, ids, labels):
        x = self.embed(ids)
        b, t, d = x.shape
        y = self.n1(x)
        q = self.rotate(self.q(y).view(b, t, 2, d // 2).transpose(1, 2))
        k, v = self.kv(y).view(b, t, 1, d).transpose(1, 2).chunk(2, -1)
        y = F.scaled_dot_product_attention(q, self.rotate(k), v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, d))
        y = self.n2(x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        scores = self.head(self.n3(x))
        return F.cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


class Alibi(nn.Module):
    """Attention with linear biases, by relative positions clipped to a table."""

    def __init__(self):
        super().__init__()
        self.qkv, self.table = nn.Linear(8, 24), nn.Embedding(9, 2)

    def forward(self, x):
        b, t, _d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        at = torch.arange(t)
        bias = self.table((at[None] - at[:, None]).clamp(-4, 4) + 4).permute(2, 0, 1)
        slope = torch.tensor([0.5, 0.25]).view(2, 1, 1) * -(at[None] - at[:, None]).abs()
        return (torch.softmax(q @ k.mT / 2 + bias + slope, -1) @ v).transpose(1, 2).flatten(2)


class LinearAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(6, 18)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        kv = torch.cumsum(torch.einsum("bld,ble->blde", k, v), 1)
        return torch.einsum("bld,blde->ble", q, kv) / (q * k.cumsum(1)).sum(-1, keepdim=True)


class Crf(nn.Module):
    """The forward algorithm, with a mask, and the score of the right path."""

    def __init__(self, tags=4):
        super().__init__()
        self.emit = nn.Linear(5, tags)
        self.start, self.stop = nn.Parameter(torch.randn(tags)), nn.Parameter(torch.randn(tags))
        self.move = nn.Parameter(torch.randn(tags, tags))

    def forward(self, x, tags, mask):
        e = self.emit(x)
        m = mask.to(e.dtype)
        rows = torch.arange(x.size(0))
        score = self.start[tags[:, 0]] + e[rows, 0, tags[:, 0]]
        alpha = self.start + e[:, 0]
        for t in range(1, x.size(1)):
            here = self.move[tags[:, t - 1], tags[:, t]] + e[rows, t, tags[:, t]]
            score = score + here * m[:, t]
            new = torch.logsumexp(alpha.unsqueeze(2) + self.move + e[:, t].unsqueeze(1), 1)
            alpha = torch.where(mask[:, t].unsqueeze(1), new, alpha)
        last = mask.long().sum(1) - 1
        score = score + self.stop[tags.gather(1, last.unsqueeze(1)).squeeze(1)]
        return (torch.logsumexp(alpha + self.stop, 1) - score).mean()


class Ctc(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 6)

    def forward(self, x, targets, input_lengths, target_lengths):
        log_probs = self.net(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(log_probs, targets, input_lengths, target_lengths, zero_infinity=True)


class Pointer(nn.Module):
    """A pointer network that may not choose twice."""

    def __init__(self, width=6):
        super().__init__()
        self.encoder, self.cell = nn.GRU(2, width, batch_first=True), nn.GRUCell(width, width)
        self.a, self.b, self.v = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, cities):
        memory, last = self.encoder(cities)
        h, x = last[0], memory.mean(1)
        taken = torch.zeros(cities.shape[:2], dtype=torch.bool)
        result = []
        for _ in range(3):
            h = self.cell(x, h)
            scores = self.v(torch.tanh(self.a(memory) + self.b(h).unsqueeze(1))).squeeze(-1)
            logits = scores.masked_fill(taken, -1e9).log_softmax(-1)
            result.append(logits.max(-1).values)
            choice = logits.argmax(-1)
            x = memory.gather(1, choice[:, None, None].expand(-1, 1, memory.size(-1))).squeeze(1)
            taken = taken.scatter(1, choice.unsqueeze(1), True)
        return torch.stack(result, 1)


class TuringMemory(nn.Module):
    """Content and shifted addressing of a memory."""

    def __init__(self, slots=6, width=4):
        super().__init__()
        self.controller = nn.LSTMCell(3 + width, 8)
        self.key, self.shift, self.erase, self.add = (nn.Linear(8, n) for n in (width + 3, 3, width, width))
        self.memory, self.out = nn.Parameter(torch.randn(slots, width) * 0.1), nn.Linear(8 + width, 2)

    def forward(self, x):
        b = x.size(0)
        memory = self.memory.expand(b, -1, -1)
        h, c = torch.zeros(b, 8), torch.zeros(b, 8)
        read, w = torch.zeros(b, memory.size(2)), torch.softmax(torch.zeros(b, memory.size(1)), 1)
        out = []
        for t in range(x.size(1)):
            h, c = self.controller(torch.cat([x[:, t], read], 1), (h, c))
            k = self.key(h)
            k, beta, gate, sharp = (
                k[:, :-3],
                F.softplus(k[:, -3:-2]),
                torch.sigmoid(k[:, -2:-1]),
                1 + F.softplus(k[:, -1:]),
            )
            content = torch.softmax(
                beta * F.cosine_similarity(memory + 1e-16, k.unsqueeze(1) + 1e-16, dim=-1), 1
            )
            w = gate * content + (1 - gate) * w
            s = torch.softmax(self.shift(h), 1)
            w = sum(s[:, i : i + 1] * torch.roll(w, i - 1, 1) for i in range(3))
            w = (w + 1e-16) ** sharp
            w = w / w.sum(1, keepdim=True)
            read = torch.einsum("bs,bsd->bd", w, memory)
            memory = memory * (1 - w.unsqueeze(2) * torch.sigmoid(self.erase(h)).unsqueeze(1))
            memory = memory + w.unsqueeze(2) * torch.tanh(self.add(h)).unsqueeze(1)
            out.append(self.out(torch.cat([h, read], 1)))
        return torch.stack(out, 1)


class NBeats(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 11)) for _ in range(3)
        )

    def forward(self, x):
        scale = x.abs().amax(1, keepdim=True) + 1e-6
        x, forecast = x / scale, 0.0
        for block in self.blocks:
            y = block(x)
            x, forecast = x - y[:, :8], forecast + y[:, 8:]
        return forecast * scale


class Autoformer(nn.Module):
    """Auto-correlation by FFT with the largest delays, and a series decomposition."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)

    def forward(self, x):
        length = x.size(1)
        q, k, v = (t.transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        spectrum = torch.fft.rfft(q, dim=-1) * torch.conj(torch.fft.rfft(k, dim=-1))
        correlation = torch.fft.irfft(spectrum, n=length, dim=-1).mean(1)
        weights, delays = torch.topk(correlation, 2, dim=-1)
        weights, doubled = torch.softmax(weights, -1), v.repeat(1, 1, 2)
        at = torch.arange(length).view(1, 1, -1)
        total = torch.zeros_like(v)
        for i in range(2):
            index = (at + delays[:, i].view(-1, 1, 1)).expand(-1, v.size(1), -1)
            total = total + torch.gather(doubled, -1, index) * weights[:, i].view(-1, 1, 1)
        y = self.out(total.transpose(1, 2)) + x
        padded = torch.cat([y[:, :1].repeat(1, 1, 1), y, y[:, -1:].repeat(1, 1, 1)], 1)
        return y - F.avg_pool1d(padded.transpose(1, 2), 3, 1).transpose(1, 2)


class Conformer(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm, self.point = nn.LayerNorm(width), nn.Conv1d(width, 2 * width, 1)
        self.depth, self.batch = nn.Conv1d(width, width, 3, padding=1, groups=width), nn.BatchNorm1d(width)
        self.out = nn.Conv1d(width, width, 1)

    def forward(self, x):
        y = F.glu(self.point(self.norm(x).transpose(1, 2)), dim=1)
        return x + self.out(F.silu(self.batch(self.depth(y)))).transpose(1, 2)


def _tokens(n, length, lowest=2):
    tokens = torch.randint(1, 20, (n, length))
    lengths = torch.randint(lowest, length + 1, (n,))
    lengths[0] = length
    return tokens * (torch.arange(length) < lengths[:, None]), lengths


def _crf(n):
    _, lengths = _tokens(n, 6)
    return torch.randn(n, 6, 5), torch.randint(0, 4, (n, 6)), torch.arange(6) < lengths[:, None]


class Hyena(nn.Module):
    """Long convolutions by Fourier transforms, with filters from a small network of positions, gated twice."""

    def __init__(self, width=6):
        super().__init__()
        self.project = nn.Linear(width, 3 * width)
        self.short = nn.Conv1d(3 * width, 3 * width, 3, padding=2, groups=3 * width)
        self.filter = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, width))
        self.decay, self.out = nn.Parameter(torch.linspace(0.1, 1.0, width)), nn.Linear(width, width)

    def forward(self, x):
        length = x.size(1)
        gate, key, value = self.short(self.project(x).transpose(1, 2))[..., :length].chunk(3, 1)
        t = torch.arange(length, dtype=x.dtype) / length
        positions = torch.stack([t, torch.sin(2 * torch.pi * t), torch.cos(2 * torch.pi * t)], -1)
        kernel = self.filter(positions).T * torch.exp(-self.decay[:, None] * t * 4)
        signal = torch.fft.rfft(key * value, n=2 * length) * torch.fft.rfft(kernel, n=2 * length)
        y = torch.fft.irfft(signal, n=2 * length)[..., :length]
        return self.out((gate * y).transpose(1, 2))


class RetNet(nn.Module):
    """Retention: attention that decays with distance, and rotated by complex numbers."""

    def __init__(self, width=8, heads=2):
        super().__init__()
        self.qkv, self.gate = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.norm, self.out = nn.GroupNorm(heads, width), nn.Linear(width, width)
        self.heads = heads
        self.register_buffer("decay", torch.log(1 - 2.0 ** (-3 - torch.arange(heads))))
        self.register_buffer("angle", 10.0 ** -torch.linspace(0, 1, width // heads // 2))

    def rotate(self, x, sign):
        turn = torch.arange(x.size(2))[:, None] * self.angle * sign
        z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * torch.polar(torch.ones_like(turn), turn)
        return torch.view_as_real(z).flatten(-2)

    def forward(self, x):
        n, length, width = x.shape
        q, k, v = (part.view(n, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        apart = torch.arange(length)[:, None] - torch.arange(length)
        weight = torch.exp(apart.clamp(min=0) * self.decay[:, None, None]) * (apart >= 0)
        y = (self.rotate(q, 1) @ self.rotate(k, 1).transpose(-2, -1) * weight) @ v
        y = self.norm(y.transpose(1, 2).reshape(n * length, width)).view(n, length, width)
        return self.out(torch.nn.functional.silu(self.gate(x)) * y)


FAMILIES = {
    "mlstm": lambda: (MatrixLstm(), lambda n: (torch.randn(n, 5, 6),)),
    "slstm": lambda: (ScalarLstm(), lambda n: (torch.randn(n, 5, 6),)),
    "mamba": lambda: (Mamba(), lambda n: (torch.randn(n, 6, 6),)),
    "mamba2_chunks": lambda: (Mamba2(), lambda n: (torch.randn(n, 8, 4),)),
    "rwkv": lambda: (Rwkv(), lambda n: (torch.randn(n, 5, 6),)),
    "packed_lstm": lambda: (Packed(), lambda n: _tokens(n, 6)),
    "packed_gru": lambda: (Packed(nn.GRU), lambda n: _tokens(n, 6)),
    "attentive_cells": lambda: (Cells(), lambda n: (torch.randn(n, 4, 3),)),
    "conv_lstm": lambda: (ConvLstm(), lambda n: (torch.randn(n, 3, 1, 6, 6),)),
    "tcn": lambda: (Tcn(), lambda n: (torch.randn(n, 2, 12),)),
    "wavenet": lambda: (WaveNet(), lambda n: (torch.randint(0, 16, (n, 10)),)),
    "encoder_padding_mask": lambda: (MaskedEncoder(), lambda n: _tokens(n, 7)[:1]),
    "gpt_tied": lambda: (Gpt(), lambda n: (torch.randint(0, 20, (n, 7)), torch.randint(0, 20, (n, 7)))),
    "alibi": lambda: (Alibi(), lambda n: (torch.randn(n, 6, 8),)),
    "linear_attention": lambda: (LinearAttention(), lambda n: (torch.randn(n, 6, 6),)),
    "crf": lambda: (Crf(), _crf),
    "ctc": lambda: (
        Ctc(),
        lambda n: (
            torch.randn(n, 9, 4),
            torch.randint(1, 6, (n, 3)),
            torch.full((n,), 9),
            torch.randint(1, 4, (n,)),
        ),
    ),
    "pointer": lambda: (Pointer(), lambda n: (torch.rand(n, 5, 2),)),
    "turing_memory": lambda: (TuringMemory(), lambda n: (torch.randn(n, 4, 3),)),
    "nbeats": lambda: (NBeats(), lambda n: (torch.randn(n, 8),)),
    "autoformer": lambda: (Autoformer(), lambda n: (torch.randn(n, 8, 4),)),
    "conformer": lambda: (Conformer(), lambda n: (torch.randn(n, 9, 8),)),
    "hyena": lambda: (Hyena(), lambda n: (torch.randn(n, 2 * n, 6),)),
    "retnet": lambda: (RetNet(), lambda n: (torch.randn(n, n + 2, 8),)),
}
