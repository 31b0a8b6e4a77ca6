"""Ways of learning: generative models, contrast, reinforcement, statistics kept in buffers, losses of their own."""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Beta, Categorical, Independent, MixtureSameFamily, Normal, kl_divergence


def mlp(*sizes: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for one, two in itertools.pairwise(sizes):
        layers += [nn.Linear(one, two), act()]
    return nn.Sequential(*layers[:-1])


class Vae(nn.Module):
    """With the noise drawn inside, which is too small here to be seen in the loss."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = mlp(6, 8, 4), mlp(2, 8, 6)
        self.encode[-1].bias.data[2:] = -40.0

    def forward(self, x):
        mu, log_variance = self.encode(x).chunk(2, -1)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * log_variance)
        kl = -0.5 * torch.sum(1 + log_variance - mu.pow(2) - log_variance.exp(), 1)
        return (
            F.binary_cross_entropy_with_logits(self.decode(z), x.sigmoid(), reduction="sum") / x.size(0)
            + kl.mean()
        )


class BetaVae(nn.Module):
    """With torch.distributions, and the noise given."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = mlp(6, 8, 4, act=nn.SiLU), mlp(2, 8, 12, act=nn.SiLU)

    def forward(self, x, noise):
        mean, raw = self.encode(x).chunk(2, -1)
        posterior = Normal(mean, F.softplus(raw) + 1e-3, validate_args=False)
        z = posterior.loc + posterior.scale * noise
        out, log_scale = self.decode(z).chunk(2, -1)
        likelihood = Normal(out, log_scale.exp(), validate_args=False).log_prob(x).sum(-1)
        prior = Normal(torch.zeros_like(mean), torch.ones_like(mean), validate_args=False)
        return (4 * kl_divergence(posterior, prior).sum(-1) - likelihood).mean()


class VectorQuantized(nn.Module):
    """VQ-VAE: the codebook is a moving average, kept in buffers that forward changes."""

    def __init__(self, codes=5, width=4, decay=0.9):
        super().__init__()
        self.encode, self.decode, self.decay = nn.Linear(6, width), nn.Linear(width, 6), decay
        codebook = torch.randn(codes, width)
        self.register_buffer("codebook", codebook)
        self.register_buffer("size", torch.ones(codes))
        self.register_buffer("average", codebook.clone())

    def forward(self, x):
        z = self.encode(x)
        distance = z.pow(2).sum(1, keepdim=True) - 2 * z @ self.codebook.t() + self.codebook.pow(2).sum(1)
        chosen = F.one_hot(distance.argmin(1), self.codebook.size(0)).type(z.dtype)
        q = chosen @ self.codebook
        if self.training:
            with torch.no_grad():
                self.size.mul_(self.decay).add_(chosen.sum(0), alpha=1 - self.decay)
                self.average.mul_(self.decay).add_(chosen.t() @ z, alpha=1 - self.decay)
                total = self.size.sum()
                size = (self.size + 1e-5) / (total + self.size.numel() * 1e-5) * total
                self.codebook.copy_(self.average / size.unsqueeze(1))
        commitment = F.mse_loss(z, q.detach())
        q = z + (q - z).detach()
        return F.mse_loss(self.decode(q), x) + 0.25 * commitment


class RealNvp(nn.Module):
    """Affine coupling layers with masks, and the log of the determinant."""

    def __init__(self, width=4, layers=3):
        super().__init__()
        self.scale = nn.ModuleList(mlp(width, 8, width, act=nn.Tanh) for _ in range(layers))
        self.shift = nn.ModuleList(mlp(width, 8, width, act=nn.Tanh) for _ in range(layers))
        masks = torch.stack([(torch.arange(width) + i) % 2 for i in range(layers)]).float()
        self.register_buffer("masks", masks)

    def forward(self, x):
        log_det = x.new_zeros(x.shape[0])
        for mask, scale, shift in zip(self.masks, self.scale, self.shift):
            s = torch.tanh(scale(x * mask)) * (1 - mask)
            x = x * mask + (1 - mask) * (x * s.exp() + shift(x * mask))
            log_det = log_det + s.sum(-1)
        log_prob = -0.5 * (x.pow(2) + math.log(2 * math.pi)).sum(-1)
        return -(log_prob + log_det).mean()


class Glow(nn.Module):
    """Actnorm that takes its scale from the first batch, and an invertible convolution with its determinant."""

    def __init__(self, channels=4):
        super().__init__()
        self.loc, self.log_scale = (
            nn.Parameter(torch.zeros(1, channels, 1, 1)),
            nn.Parameter(torch.zeros(1, channels, 1, 1)),
        )
        self.weight = nn.Parameter(torch.linalg.qr(torch.randn(channels, channels))[0].contiguous())
        self.net = nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 1))

    def forward(self, x):
        b, c, h, w = x.shape
        x = x.view(b, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4).reshape(b, c * 4, h // 2, w // 2)
        h, w = x.shape[2:]
        x = (x + self.loc) * self.log_scale.exp()
        log_det = h * w * (self.log_scale.sum() + torch.slogdet(self.weight)[1])
        x = F.conv2d(x, self.weight[:, :, None, None])
        a, b = x.chunk(2, 1)
        log_s, t = self.net(a).chunk(2, 1)
        s = torch.sigmoid(log_s + 2)
        b = (b + t) * s
        log_det = log_det + torch.log(s).flatten(1).sum(1)
        z = torch.cat([a, b], 1)
        return -(log_det - 0.5 * z.pow(2).flatten(1).sum(1)).mean() / z[0].numel()


class SplineFlow(nn.Module):
    """A rational quadratic spline, its bin found by comparison."""

    def __init__(self, bins=5):
        super().__init__()
        self.bins, self.net = bins, mlp(1, 16, 3 * bins - 1)

    def forward(self, x):
        k, bound = self.bins, 3.0
        one, two = x[:, :1], x[:, 1].clamp(-bound + 1e-3, bound - 1e-3)
        w, h, d = torch.split(self.net(one), [k, k, k - 1], -1)
        w, h = 1e-3 + (1 - 1e-3 * k) * w.softmax(-1), 1e-3 + (1 - 1e-3 * k) * h.softmax(-1)
        d = F.pad(1e-3 + F.softplus(d), (1, 1), value=1.0)
        xs = F.pad(w.cumsum(-1), (1, 0)) * 2 * bound - bound
        ys = F.pad(h.cumsum(-1), (1, 0)) * 2 * bound - bound
        index = torch.sum(two[..., None] >= xs[..., 1:-1], dim=-1, keepdim=True)
        x0, y0, d0 = (t.gather(-1, index)[..., 0] for t in (xs, ys, d))
        x1, y1, d1 = (t.gather(-1, index + 1)[..., 0] for t in (xs, ys, d))
        s, theta = (y1 - y0) / (x1 - x0), (two - x0) / (x1 - x0)
        mixed = theta * (1 - theta)
        bottom = s + (d1 + d0 - 2 * s) * mixed
        y = y0 + (y1 - y0) * (s * theta.pow(2) + d0 * mixed) / bottom
        slope = s.pow(2) * (d1 * theta.pow(2) + 2 * s * mixed + d0 * (1 - theta).pow(2)) / bottom.pow(2)
        return (0.5 * y.pow(2) - slope.log()).mean()


class MaskedAutoencoder(nn.Module):
    """MADE: masks make each output depend on earlier inputs alone."""

    def __init__(self, width=5, hidden=12):
        super().__init__()
        self.one, self.two = nn.Linear(width, hidden), nn.Linear(hidden, 2 * width)
        degrees, inner = torch.arange(width), torch.arange(hidden) % (width - 1)
        self.register_buffer("first", (inner[:, None] >= degrees[None]).float())
        self.register_buffer("second", (degrees.repeat(2)[:, None] > inner[None]).float())

    def forward(self, x):
        h = F.relu(F.linear(x, self.one.weight * self.first, self.one.bias))
        mean, log_scale = F.linear(h, self.two.weight * self.second, self.two.bias).chunk(2, -1)
        u = (x - mean) * torch.exp(-log_scale)
        return (0.5 * u**2 + log_scale).sum(-1).mean()


class PixelCnn(nn.Module):
    """Masked convolutions as published: forward multiplies the weight's data by the mask."""

    class Masked(nn.Conv2d):
        def __init__(self, kind, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.register_buffer("mask", self.weight.data.clone())
            _, _, h, w = self.weight.size()
            self.mask.fill_(1)
            self.mask[:, :, h // 2, w // 2 + (kind == "B") :] = 0
            self.mask[:, :, h // 2 + 1 :] = 0

        def forward(self, x):
            self.weight.data *= self.mask
            return super().forward(x)

    def __init__(self):
        super().__init__()
        self.one, self.two = self.Masked("A", 1, 6, 3, padding=1), self.Masked("B", 6, 4, 3, padding=1)

    def forward(self, x, levels):
        return F.cross_entropy(self.two(F.relu(self.one(x))), levels)


class Diffusion(nn.Module):
    """DDPM: a schedule in buffers, embeddings of time, a small U-Net with attention."""

    def __init__(self, width=8, steps=50):
        super().__init__()
        self.register_buffer("alphas", torch.cumprod(1 - torch.linspace(1e-4, 0.02, steps), 0))
        self.time = mlp(width, 16, width, act=nn.SiLU)
        self.enter, self.down = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, width, 3, 2, 1)
        self.norm, self.mid = nn.GroupNorm(2, width), nn.Conv2d(width, width, 3, padding=1)
        self.qkv, self.out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(2 * width, 1, 3, padding=1)

    def embed(self, t, width=8):
        rates = torch.exp(torch.arange(width // 2) * -(math.log(10000) / (width // 2 - 1)))
        angle = t[:, None] * rates[None, :]
        return self.time(torch.cat((angle.sin(), angle.cos()), dim=-1))

    def forward(self, x, t, noise):
        a = self.alphas.gather(-1, t).reshape(x.shape[0], *((1,) * (x.dim() - 1)))
        noisy = a.sqrt() * x + (1 - a).sqrt() * noise
        first = self.enter(noisy)
        h = self.down(first) + self.embed(t)[:, :, None, None]
        h = h + self.mid(F.silu(self.norm(h)))
        b, c, height, w = h.shape
        q, k, v = self.qkv(h).reshape(b, 3, c, height * w).unbind(1)
        weights = torch.einsum("bci,bcj->bij", q * c**-0.5, k).softmax(-1)
        h = h + torch.einsum("bij,bcj->bci", weights, v).reshape(b, c, height, w)
        h = torch.cat([F.interpolate(h, scale_factor=2, mode="nearest"), first], 1)
        return F.mse_loss(self.out(h), noise)


class DiffusionTransformer(nn.Module):
    """DiT: adaptive layer norms, a class that may be dropped, flow matching's target."""

    def __init__(self, width=8):
        super().__init__()
        self.patch, self.label = nn.Conv2d(1, width, 2, 2), nn.Embedding(4, width)
        self.time = mlp(1, width, width, act=nn.SiLU)
        self.modulate, self.norm = (
            nn.Linear(width, 6 * width),
            nn.LayerNorm(width, elementwise_affine=False, eps=1e-6),
        )
        self.attention, self.mlp = (
            nn.MultiheadAttention(width, 2, batch_first=True),
            mlp(width, 16, width, act=nn.GELU),
        )
        self.out = nn.Linear(width, 4)

    def forward(self, x, noise, t, label):
        mixed = (1 - t).view(-1, 1, 1, 1) * noise + t.view(-1, 1, 1, 1) * x
        h = self.patch(mixed).flatten(2).transpose(1, 2)
        c = self.time(t.unsqueeze(-1)) + self.label(label)
        s1, b1, g1, s2, b2, g2 = self.modulate(F.silu(c)).unsqueeze(1).chunk(6, -1)
        y = self.norm(h) * (1 + s1) + b1
        h = h + g1 * self.attention(y, y, y, need_weights=False)[0]
        h = h + g2 * self.mlp(self.norm(h) * (1 + s2) + b2)
        b, n, _ = h.shape
        side = int(n**0.5)
        out = self.out(h).reshape(b, side, side, 2, 2, 1)
        out = torch.einsum("nhwpqc->nchpwq", out).reshape(b, 1, side * 2, side * 2)
        return F.mse_loss(out, x - noise)


class SpectralCritic(nn.Module):
    """SN-GAN: spectral norms as hooks, whose vectors move at each forward, and a hinge loss."""

    def __init__(self):
        super().__init__()
        norm = nn.utils.spectral_norm
        self.net = nn.Sequential(
            norm(nn.Conv2d(1, 6, 3, 2, 1)), nn.LeakyReLU(0.1), nn.Flatten(), norm(nn.Linear(96, 1))
        )

    def forward(self, real, fake):
        return F.relu(1 - self.net(real)).mean() + F.relu(1 + self.net(fake)).mean()


class BatchRenorm(nn.Module):
    """Batch renormalization, with its statistics and its counter of steps."""

    def __init__(self, width=6, momentum=0.1):
        super().__init__()
        self.one, self.two, self.momentum = nn.Linear(4, width), nn.Linear(width, 2), momentum
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_std", torch.ones(width))
        self.register_buffer("steps", torch.tensor(0))

    @property
    def rmax(self):
        return (2 / 35000 * self.steps + 25 / 35).clamp(1.0, 3.0)

    @property
    def dmax(self):
        return (5 / 20000 * self.steps - 25 / 20).clamp(0.0, 5.0)

    def forward(self, x):
        x = self.one(x)
        mean, std = x.mean(0), x.std(0, unbiased=False) + 1e-3
        r = (std.detach() / self.running_std.view_as(std)).clamp(1 / self.rmax, self.rmax)
        d = ((mean.detach() - self.running_mean.view_as(mean)) / self.running_std).clamp(
            -self.dmax, self.dmax
        )
        x = (x - mean) / std * r + d
        self.running_mean += self.momentum * (mean.detach() - self.running_mean)
        self.running_std += self.momentum * (std.detach() - self.running_std)
        self.steps += 1
        return self.two(F.relu(self.weight * x + self.bias))


class Byol(nn.Module):
    """A target network that is a moving average of the first one, updated by forward."""

    def __init__(self):
        super().__init__()
        self.online, self.target, self.predict = mlp(5, 8, 4), mlp(5, 8, 4), mlp(4, 8, 4)
        self.target.load_state_dict(self.online.state_dict())
        self.target.requires_grad_(False)

    @torch.no_grad()
    def follow(self, momentum=0.9):
        for theirs, ours in zip(self.target.parameters(), self.online.parameters()):
            theirs.data = theirs.data * momentum + ours.data * (1 - momentum)

    def forward(self, one, two):
        self.follow()
        loss = 0.0
        for a, b in ((one, two), (two, one)):
            prediction = F.normalize(self.predict(self.online(a)), dim=-1)
            with torch.no_grad():
                goal = F.normalize(self.target(b), dim=-1)
            loss = loss + 2 - 2 * (prediction * goal.detach()).sum(-1).mean()
        return loss


class Moco(nn.Module):
    """A queue of negatives in a buffer, with its pointer."""

    def __init__(self, width=4, length=12):
        super().__init__()
        self.encode, self.length = mlp(5, 8, width), length
        self.register_buffer("queue", F.normalize(torch.randn(width, length), dim=0))

    def forward(self, query, key):
        q = F.normalize(self.encode(query), dim=1)
        with torch.no_grad():
            k = F.normalize(self.encode(key), dim=1)
        positive = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        logits = torch.cat([positive, negative], dim=1) / 0.2
        self.queue = torch.cat([k.t(), self.queue], 1)[:, : self.length]
        return F.cross_entropy(logits, torch.zeros(logits.shape[0], dtype=torch.long))


class SimClr(nn.Module):
    """NT-Xent over both views of a batch."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, one, two):
        n = one.shape[0]
        z = F.normalize(self.encode(torch.cat([one, two])), dim=1)
        scores = z @ z.T / 0.5
        scores.masked_fill_(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
        labels = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
        return F.cross_entropy(scores, labels)


class SupervisedContrast(nn.Module):
    """All of one label are positives; the mean over those that have any."""

    def __init__(self):
        super().__init__()
        self.encode = mlp(5, 8, 4)

    def forward(self, x, labels):
        z = F.normalize(self.encode(x), dim=1)
        scores = torch.div(torch.matmul(z, z.T), 0.1)
        scores = scores - torch.max(scores, dim=1, keepdim=True)[0].detach()
        same = torch.eq(labels.view(-1, 1), labels.view(1, -1)).float()
        others = torch.scatter(torch.ones_like(same), 1, torch.arange(x.shape[0]).view(-1, 1), 0)
        same = same * others
        log_prob = scores - torch.log((torch.exp(scores) * others).sum(1, keepdim=True))
        pairs = same.sum(1)
        pairs = torch.where(pairs < 1e-6, 1, pairs)
        return -((same * log_prob).sum(1) / pairs).mean()


class BarlowTwins(nn.Module):
    """A cross correlation, with what is off its diagonal by a change of shape."""

    def __init__(self):
        super().__init__()
        self.encode, self.norm = mlp(5, 8, 6), nn.BatchNorm1d(6, affine=False)

    def forward(self, one, two):
        c = self.norm(self.encode(one)).T @ self.norm(self.encode(two)) / one.shape[0]
        n, _ = c.shape
        off = c.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten()
        return torch.diagonal(c).add(-1).pow(2).sum() + 0.005 * off.pow(2).sum()


class Clip(nn.Module):
    """Pictures and words, with a learned temperature that is held below its limit."""

    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(1, 4, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 6)
        )
        self.embed, self.text = nn.Embedding(12, 6, padding_idx=0), nn.GRU(6, 6, batch_first=True)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, images, tokens):
        i = F.normalize(self.image(images), dim=-1)
        states, _ = self.text(self.embed(tokens))
        last = tokens.ne(0).sum(1).sub(1).clamp(min=0)
        t = F.normalize(states[torch.arange(tokens.shape[0]), last], dim=-1)
        logits = self.logit_scale.exp().clamp(max=100) * i @ t.t()
        labels = torch.arange(logits.shape[0])
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


class ArcFace(nn.Module):
    """An angular margin, with the corner that papers' code has."""

    def __init__(self, width=6, classes=4, margin=0.5, scale=16.0):
        super().__init__()
        self.encode, self.weight = mlp(5, 8, width), nn.Parameter(torch.randn(classes, width))
        self.scale, self.cos, self.sin = scale, math.cos(margin), math.sin(margin)
        self.limit, self.extra = math.cos(math.pi - margin), math.sin(math.pi - margin) * margin

    def forward(self, x, labels):
        cosine = F.linear(F.normalize(self.encode(x)), F.normalize(self.weight))
        sine = torch.sqrt((1.0 - torch.pow(cosine, 2)).clamp(1e-6, 1))
        phi = cosine * self.cos - sine * self.sin
        phi = torch.where(cosine > self.limit, phi, cosine - self.extra)
        chosen = torch.zeros(cosine.size())
        chosen.scatter_(1, labels.view(-1, 1).long(), 1)
        return F.cross_entropy((chosen * phi + (1.0 - chosen) * cosine) * self.scale, labels)


class HardTriplets(nn.Module):
    """The farthest of the same label and the nearest of another, by cdist."""

    def __init__(self):
        super().__init__()
        self.encode = mlp(5, 8, 4, act=nn.Tanh)

    def forward(self, x, labels):
        z = self.encode(x)
        distance = torch.cdist(z, z)
        same = labels[:, None] == labels[None, :]
        far = distance.masked_fill(~same, 0.0).max(1).values
        near = distance.masked_fill(same, float("inf")).min(1).values
        return F.softplus(far - near).mean()


class MixtureDensity(nn.Module):
    """A mixture of normal distributions by torch.distributions."""

    def __init__(self, parts=3):
        super().__init__()
        self.net, self.parts = mlp(2, 12, 5 * parts, act=nn.Tanh), parts

    def forward(self, x, y):
        logits, mean, raw = torch.split(self.net(x), [self.parts, 2 * self.parts, 2 * self.parts], -1)
        mean, scale = mean.view(-1, self.parts, 2), F.softplus(raw).view(-1, self.parts, 2) + 1e-2
        parts = Independent(Normal(mean, scale, validate_args=False), 1, validate_args=False)
        mixture = MixtureSameFamily(
            Categorical(logits=logits, validate_args=False), parts, validate_args=False
        )
        return -mixture.log_prob(y).mean()


class Ppo(nn.Module):
    """Clipped ratios, a value loss, an entropy bonus, advantages normalized in the batch."""

    def __init__(self):
        super().__init__()
        self.body, self.policy, self.value = mlp(4, 12, 8, act=nn.Tanh), nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, state, action, old, advantage, returns):
        h = self.body(state)
        policy = Categorical(logits=self.policy(h))
        ratio = torch.exp(policy.log_prob(action) - old)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        clipped = torch.clamp(ratio, 0.8, 1.2) * advantage
        loss = -torch.min(ratio * advantage, clipped).mean()
        return loss + 0.5 * F.mse_loss(self.value(h).squeeze(-1), returns) - 0.01 * policy.entropy().mean()


class BetaPolicy(nn.Module):
    """Continuous actions from a Beta distribution: log-gamma functions."""

    def __init__(self):
        super().__init__()
        self.net = mlp(4, 8, 4, act=nn.Tanh)

    def forward(self, state, action, advantage):
        a, b = (F.softplus(self.net(state)) + 1).chunk(2, -1)
        return -(Beta(a, b, validate_args=False).log_prob(action).sum(-1) * advantage).mean()


class DoubleQ(nn.Module):
    """Double DQN with a dueling head; the target's parameters do not train."""

    def __init__(self):
        super().__init__()
        self.online, self.target = mlp(4, 12, 4), mlp(4, 12, 4)
        self.target.requires_grad_(False)

    @staticmethod
    def q(net, state):
        value, advantage = torch.split(net(state), [1, 3], -1)
        return value + advantage - advantage.mean(-1, keepdim=True)

    def forward(self, state, action, reward, following, done):
        chosen = self.q(self.online, state).gather(1, action.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            best = self.q(self.online, following).argmax(1, keepdim=True)
            goal = reward + 0.99 * (1 - done) * self.q(self.target, following).gather(1, best).squeeze(1)
        return F.smooth_l1_loss(chosen, goal)


class QuantileQ(nn.Module):
    """QR-DQN's loss over all pairs of quantiles."""

    def __init__(self, quantiles=5):
        super().__init__()
        self.net = mlp(4, 12, quantiles)
        self.register_buffer("tau", (torch.arange(quantiles) + 0.5) / quantiles)

    def forward(self, state, goal):
        apart = goal.unsqueeze(1) - self.net(state).unsqueeze(2)
        huber = torch.where(apart.abs() <= 1, 0.5 * apart.pow(2), apart.abs() - 0.5)
        return ((self.tau.view(1, -1, 1) - (apart.detach() < 0).float()).abs() * huber).mean(2).sum(1).mean()


class Cox(nn.Module):
    """Partial likelihood: sorted by time, a running log of sums."""

    def __init__(self):
        super().__init__()
        self.net = mlp(4, 8, 1, act=nn.Tanh)

    def forward(self, x, time, event):
        order = torch.argsort(time, descending=True)
        risk = self.net(x).squeeze(-1)[order]
        event = event[order]
        return -((risk - torch.logcumsumexp(risk, 0)) * event).sum() / (event.sum() + 1e-8)


class Sinkhorn(nn.Module):
    """Optimal transport between two sets of points, twenty rounds in logarithms."""

    def __init__(self):
        super().__init__()
        self.net = mlp(2, 8, 2, act=nn.Tanh)

    def forward(self, x, y):
        x = x + self.net(x)
        cost = (x.unsqueeze(2) - y.unsqueeze(1)).pow(2).sum(-1)
        n, m = cost.shape[1:]
        f, g = torch.zeros_like(cost[:, :, 0]), torch.zeros_like(cost[:, 0])
        for _ in range(20):
            f = -0.1 * torch.logsumexp((g.unsqueeze(1) - cost) / 0.1 - math.log(m), 2)
            g = -0.1 * torch.logsumexp((f.unsqueeze(2) - cost) / 0.1 - math.log(n), 1)
        plan = torch.exp((f.unsqueeze(2) + g.unsqueeze(1) - cost) / 0.1) / (n * m)
        return (plan * cost).sum((1, 2)).mean()


class SoftDtw(nn.Module):
    """Soft dynamic time warping, its table cell by cell."""

    def __init__(self):
        super().__init__()
        self.net = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x, y):
        x = self.net(x.unsqueeze(1)).squeeze(1)
        d = (x.unsqueeze(2) - y.unsqueeze(1)).pow(2)
        b, n, m = d.shape
        r = torch.full((b, n + 1, m + 1), 1e4)
        r[:, 0, 0] = 0
        for i in range(1, n + 1):
            for j in range(1, m + 1):
                before = torch.stack([r[:, i - 1, j - 1], r[:, i - 1, j], r[:, i, j - 1]], -1)
                r[:, i, j] = d[:, i - 1, j - 1] - torch.logsumexp(-before, -1)
        return r[:, -1, -1].mean()


class Contractive(nn.Module):
    """The norm of the encoder's Jacobian by jacfwd."""

    differentiates = True

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Sequential(nn.Linear(5, 4), nn.Sigmoid()), nn.Linear(4, 5)

    def forward(self, x):
        jacobian = torch.func.vmap(torch.func.jacfwd(self.encode))(x)
        return F.mse_loss(self.decode(self.encode(x)), x) + 0.1 * jacobian.pow(2).sum((1, 2)).mean()


class Hessians(nn.Module):
    """The curvature of a scalar field, by hessian."""

    differentiates = True

    def __init__(self):
        super().__init__()
        self.net = mlp(3, 10, 1, act=nn.Tanh)

    def forward(self, x, y):
        field = torch.func.vmap(torch.func.hessian(lambda p: self.net(p).squeeze(-1)))(x)
        return F.mse_loss(torch.einsum("bii->b", field), y)


class RPenalty(nn.Module):
    """R1: the slope of the scores at real pictures, through batch norm and max pooling."""

    differentiates = True

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.Softplus(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 1)
        )

    def forward(self, x):
        x.requires_grad_()
        scores = self.net(x)
        slope = torch.autograd.grad(outputs=scores.sum(), inputs=x, create_graph=True)[0]
        return F.softplus(-scores).mean() + 5 * slope.pow(2).reshape(slope.shape[0], -1).sum(1).mean()


class ManyLabels(nn.Module):
    """Losses for several labels at once: margins, soft margins, weights from counts."""

    def __init__(self):
        super().__init__()
        self.net = mlp(4, 8, 5)

    def forward(self, x, ordered, flags, label):
        out = self.net(x)
        weights = 1.0 / (torch.bincount(label, minlength=5).float() + 1)
        loss = F.multilabel_margin_loss(out, ordered) + F.multilabel_soft_margin_loss(out, flags)
        return (
            loss
            + F.multi_margin_loss(out, label)
            + F.cross_entropy(out, label, weight=weights, label_smoothing=0.1)
        )


class Distilled(nn.Module):
    """A student that follows a frozen teacher, at a temperature, with attention transfer."""

    def __init__(self):
        super().__init__()
        self.teacher, self.student = mlp(4, 12, 3), mlp(4, 6, 3)
        for parameter in self.teacher.parameters():
            parameter.requires_grad = False

    def forward(self, x, labels):
        with torch.no_grad():
            teacher = self.teacher(x)
        student = self.student(x)
        soft = F.kl_div(F.log_softmax(student / 4, 1), F.softmax(teacher / 4, 1), reduction="batchmean") * 16
        return 0.7 * soft + 0.3 * F.cross_entropy(student, labels)


class Dice(nn.Module):
    """Lovász hinge, by sorted errors, and a Tversky index."""

    def __init__(self):
        super().__init__()
        self.net = nn.Conv2d(2, 1, 3, padding=1)

    def forward(self, x, mask):
        logits = self.net(x).squeeze(1)
        errors = 1 - logits.flatten() * (2 * mask.flatten() - 1)
        ordered, index = torch.sort(errors, descending=True)
        truth = mask.flatten()[index]
        total = truth.sum()
        jaccard = 1 - (total - truth.cumsum(0)) / (total + (1 - truth).cumsum(0))
        jaccard = torch.cat([jaccard[:1], jaccard[1:] - jaccard[:-1]])
        p = logits.sigmoid()
        hit, false, missed = (p * mask).sum(), (p * (1 - mask)).sum(), ((1 - p) * mask).sum()
        return torch.dot(F.relu(ordered), jaccard) + 1 - (hit + 1) / (hit + 0.3 * false + 0.7 * missed + 1)


class GaussianProcess(nn.Module):
    """Deep kernel learning: a Cholesky factor of a covariance."""

    def __init__(self):
        super().__init__()
        self.net, self.noise = mlp(3, 8, 2, act=nn.Tanh), nn.Parameter(torch.tensor(0.0))

    def forward(self, x, y):
        z = self.net(x)
        k = torch.exp(-0.5 * torch.cdist(z, z).pow(2)) + (F.softplus(self.noise) + 1e-3) * torch.eye(
            x.size(0)
        )
        factor = torch.linalg.cholesky(k)
        a = torch.cholesky_solve(y.unsqueeze(-1), factor)
        return 0.5 * (y @ a).squeeze() + torch.log(torch.diagonal(factor)).sum()


class Whitened(nn.Module):
    """Components by a singular value decomposition, which ONNX has no operator for."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 4)

    def forward(self, x):
        u, s, _ = torch.linalg.svd(self.net(x), full_matrices=False)
        return (u * s.log1p()).sum()


def _margin_labels(n):
    ordered = torch.stack([torch.randperm(5) for _ in range(n)])
    ordered[:, 2:] = torch.where(torch.rand(n, 3) < 0.7, -1, ordered[:, 2:])
    return torch.randn(n, 4), ordered, torch.randint(0, 2, (n, 5)).float(), torch.randint(0, 5, (n,))


class Siamese(nn.Module):
    """Two pictures through one network; near where they belong together, apart by a margin where not."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.PReLU(),
            nn.AdaptiveAvgPool2d(3),
            nn.Flatten(),
            nn.Linear(36, 5),
        )

    def forward(self, one, two, same):
        distance = F.pairwise_distance(self.net(one), self.net(two))
        return (same * distance**2 + (1 - same) * F.relu(1.5 - distance) ** 2).mean()


class Margins(nn.Module):
    """Losses with margins, one after another."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 5)

    def forward(self, x, label, sign):
        scores = self.net(x)
        return (
            F.multi_margin_loss(scores, label, p=2, margin=0.7)
            + F.multilabel_soft_margin_loss(scores, F.one_hot(label, 5).to(scores.dtype))
            + F.hinge_embedding_loss(scores[:, 0], sign, margin=0.5)
            + F.margin_ranking_loss(scores[:, 1], scores[:, 2], sign, margin=0.1)
            + F.cosine_embedding_loss(scores, x.new_ones(x.size(0), 5), sign, margin=0.2)
            + F.soft_margin_loss(scores[:, 3], sign)
        )


FAMILIES = {
    "vae": lambda: (Vae(), lambda n: (torch.randn(n, 6),)),
    "beta_vae": lambda: (BetaVae(), lambda n: (torch.randn(n, 6), torch.randn(n, 2))),
    "vq_vae_ema": lambda: (VectorQuantized(), lambda n: (torch.randn(n, 6),)),
    "real_nvp": lambda: (RealNvp(), lambda n: (torch.randn(n, 4),)),
    "glow": lambda: (Glow(), lambda n: (torch.randn(n, 1, 4, 4),)),
    "spline_flow": lambda: (SplineFlow(), lambda n: (torch.randn(n, 2),)),
    "made": lambda: (MaskedAutoencoder(), lambda n: (torch.randn(n, 5),)),
    "pixel_cnn": lambda: (PixelCnn(), lambda n: (torch.rand(n, 1, 6, 6), torch.randint(0, 4, (n, 6, 6)))),
    "ddpm": lambda: (
        Diffusion(), lambda n: (torch.randn(n, 1, 8, 8), torch.randint(0, 50, (n,)), torch.randn(n, 1, 8, 8))
    ),
    "dit_flow_matching": lambda: (
        DiffusionTransformer(),
        lambda n: (torch.randn(n, 1, 8, 8), torch.randn(n, 1, 8, 8), torch.rand(n), torch.randint(0, 4, (n,))),
    ),
    "sn_gan": lambda: (SpectralCritic(), lambda n: (torch.randn(n, 1, 8, 8), torch.randn(n, 1, 8, 8))),
    "batch_renorm": lambda: (BatchRenorm(), lambda n: (torch.randn(n, 4),)),
    "byol": lambda: (Byol(), lambda n: (torch.randn(n, 5), torch.randn(n, 5))),
    "moco": lambda: (Moco(), lambda n: (torch.randn(n, 5), torch.randn(n, 5))),
    "simclr": lambda: (SimClr(), lambda n: (torch.randn(n, 5), torch.randn(n, 5))),
    "supervised_contrast": lambda: (
        SupervisedContrast(), lambda n: (torch.randn(2 * n, 5), torch.randint(0, 3, (2 * n,)))
    ),
    "barlow_twins": lambda: (BarlowTwins(), lambda n: (torch.randn(n, 5), torch.randn(n, 5))),
    "clip": lambda: (
        Clip(), lambda n: (torch.randn(n, 1, 8, 8), torch.randint(1, 12, (n, 5)) * (torch.arange(5) < 3 + n % 2))
    ),
    "arcface": lambda: (ArcFace(), lambda n: (torch.randn(n, 5), torch.randint(0, 4, (n,)))),
    "hard_triplets": lambda: (HardTriplets(), lambda n: (torch.randn(2 * n, 5), torch.arange(2 * n) % 3)),
    "mixture_density": lambda: (MixtureDensity(), lambda n: (torch.randn(n, 2), torch.randn(n, 2))),
    "ppo": lambda: (
        Ppo(),
        lambda n: (torch.randn(n, 4), torch.randint(0, 3, (n,)), torch.randn(n) - 1, torch.randn(n), torch.randn(n)),
    ),
    "beta_policy": lambda: (
        BetaPolicy(), lambda n: (torch.randn(n, 4), torch.rand(n, 2) * 0.8 + 0.1, torch.randn(n))
    ),
    "double_dqn": lambda: (
        DoubleQ(),
        lambda n: (
            torch.randn(n, 4),
            torch.randint(0, 3, (n,)),
            torch.randn(n),
            torch.randn(n, 4),
            torch.randint(0, 2, (n,)).float(),
        ),
    ),
    "quantile_dqn": lambda: (QuantileQ(), lambda n: (torch.randn(n, 4), torch.randn(n, 5))),
    "cox_survival": lambda: (
        Cox(), lambda n: (torch.randn(n, 4), torch.rand(n), torch.randint(0, 2, (n,)).float())
    ),
    "sinkhorn": lambda: (Sinkhorn(), lambda n: (torch.randn(n, 6, 2), torch.randn(n, 5, 2))),
    "soft_dtw": lambda: (SoftDtw(), lambda n: (torch.randn(n, 5), torch.randn(n, 4))),
    "contractive": lambda: (Contractive(), lambda n: (torch.randn(n, 5),)),
    "hessian": lambda: (Hessians(), lambda n: (torch.randn(n, 3), torch.randn(n))),
    "r1_penalty": lambda: (RPenalty(), lambda n: (torch.randn(n, 1, 8, 8),)),
    "many_labels": lambda: (ManyLabels(), _margin_labels),
    "distillation": lambda: (Distilled(), lambda n: (torch.randn(n, 4), torch.randint(0, 3, (n,)))),
    "lovasz_tversky": lambda: (Dice(), lambda n: (torch.randn(n, 2, 6, 6), torch.randint(0, 2, (n, 6, 6)).float())),
    "gaussian_process": lambda: (GaussianProcess(), lambda n: (torch.randn(n, 3), torch.randn(n))),
    "svd": lambda: (Whitened(), lambda n: (torch.randn(n + 4, 4),)),
    "siamese": lambda: (
        Siamese(), lambda n: (torch.randn(n, 1, 8, 8), torch.randn(n, 1, 8, 8), torch.randint(0, 2, (n,)).float())
    ),
    "margins": lambda: (
        Margins(), lambda n: (torch.randn(n, 4), torch.randint(0, 5, (n,)), torch.randint(0, 2, (n,)).float() * 2 - 1)
    ),
}  # fmt: skip
