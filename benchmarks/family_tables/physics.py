"""Networks of physics and geometry: derivatives inside forward, Fourier transforms, fields, differential equations."""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import nn


def mlp(*sizes: int, act: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    layers: list[nn.Module] = []
    for one, two in itertools.pairwise(sizes):
        layers += [nn.Linear(one, two), act()]
    return nn.Sequential(*layers[:-1])


class PhysicsInformed(nn.Module):
    """Burgers' equation: u_t + u·u_x = ν·u_xx."""

    differentiates = True

    def __init__(self):
        super().__init__()
        self.net = mlp(2, 16, 16, 1)

    def forward(self, x, t):
        x, t = x.requires_grad_(), t.requires_grad_()
        u = self.net(torch.cat([x, t], 1))
        one = torch.ones_like(u)
        u_t = torch.autograd.grad(u, t, one, create_graph=True)[0]
        u_x = torch.autograd.grad(u, x, one, create_graph=True)[0]
        u_xx = torch.autograd.grad(u_x, x, one, create_graph=True)[0]
        return (u_t + u * u_x - 0.01 * u_xx).square().mean() + (u - torch.sin(x)).square().mean()


class Critic(nn.Module):
    """WGAN-GP's critic with its penalty."""

    differentiates = True

    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 4, 3, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(4, 8, 3, 2, 1), nn.LeakyReLU(0.2)
        )
        self.head = nn.Linear(8 * 4, 1)

    def score(self, x):
        return self.head(self.conv(x).flatten(1))

    def forward(self, real, fake, mix):
        middle = (mix * real + (1 - mix) * fake).requires_grad_(True)
        scores = self.score(middle)
        (slope,) = torch.autograd.grad(scores.sum(), middle, create_graph=True)
        penalty = ((slope.flatten(1).norm(2, dim=1) - 1) ** 2).mean()
        return self.score(fake).mean() - self.score(real).mean() + 10 * penalty


class Energy(nn.Module):
    """Forces as the negative gradient of an energy, as interatomic potentials have them."""

    differentiates = True

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 8)
        self.net = mlp(8 + 4, 16, 1, act=nn.SiLU)

    def forward(self, kinds, positions):
        positions.requires_grad_(True)
        apart = positions.unsqueeze(2) - positions.unsqueeze(1)
        distances = (apart.square().sum(-1) + torch.eye(positions.shape[1])).sqrt()
        radial = torch.exp(-((distances.unsqueeze(-1) - torch.linspace(0, 3, 4)) ** 2)).sum(2)
        energy = self.net(torch.cat([self.embed(kinds), radial], -1)).sum()
        forces = -torch.autograd.grad(energy, positions, create_graph=True)[0]
        return forces


class Hamiltonian(nn.Module):
    """Hamilton's equations by torch.func."""

    differentiates = True

    def __init__(self):
        super().__init__()
        self.net = mlp(4, 16, 1, act=nn.Softplus)

    def forward(self, state):
        slope = torch.func.vmap(torch.func.grad(lambda s: self.net(s).squeeze()))(state)
        q, p = slope.chunk(2, -1)
        return torch.cat([p, -q], -1)


class ScoreMatching(nn.Module):
    """The trace of a Jacobian, by jacrev."""

    differentiates = True

    def __init__(self):
        super().__init__()
        self.net = mlp(3, 16, 3, act=nn.SiLU)

    def forward(self, x):
        jacobian = torch.func.vmap(torch.func.jacrev(self.net))(x)
        trace = jacobian.diagonal(dim1=-2, dim2=-1).sum(-1)
        return (trace + 0.5 * self.net(x).square().sum(-1)).mean()


class Maml(nn.Module):
    """One inner step of gradient descent through a functional call."""

    differentiates = True

    def __init__(self):
        super().__init__()
        self.net = mlp(3, 8, 1)

    def forward(self, x, y, x_query, y_query):
        weights = dict(self.net.named_parameters())
        loss = F.mse_loss(torch.func.functional_call(self.net, weights, (x,)), y)
        slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        moved = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), slopes)}
        return F.mse_loss(torch.func.functional_call(self.net, moved, (x_query,)), y_query)


class SpectralConv(nn.Module):
    def __init__(self, width, modes):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, modes, dtype=torch.cfloat) / width)
        self.modes = modes

    def forward(self, x):
        spectrum = torch.fft.rfft(x)
        out = torch.zeros_like(spectrum)
        out[:, :, : self.modes] = torch.einsum("bix,iox->box", spectrum[:, :, : self.modes], self.weight)
        return torch.fft.irfft(out, n=x.size(-1))


class Fno(nn.Module):
    def __init__(self, width=8, modes=4):
        super().__init__()
        self.lift = nn.Linear(2, width)
        self.spectral = nn.ModuleList(SpectralConv(width, modes) for _ in range(2))
        self.local = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(2))
        self.project = nn.Linear(width, 1)

    def forward(self, x):
        grid = torch.linspace(0, 1, x.shape[1]).view(1, -1, 1).expand(x.shape[0], -1, -1)
        x = self.lift(torch.cat([x, grid], -1)).permute(0, 2, 1)
        for spectral, local in zip(self.spectral, self.local):
            x = F.gelu(spectral(x) + local(x))
        return self.project(x.permute(0, 2, 1))


class Fno2d(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        scale = 1 / width
        self.w1 = nn.Parameter(scale * torch.randn(width, width, 3, 3, 2))
        self.w2 = nn.Parameter(scale * torch.randn(width, width, 3, 3, 2))
        self.lift, self.out = nn.Conv2d(1, width, 1), nn.Conv2d(width, 1, 1)

    def forward(self, x):
        x = self.lift(x)
        spectrum = torch.fft.rfft2(x)
        out = torch.zeros(*spectrum.shape, dtype=torch.cfloat)
        one, two = torch.view_as_complex(self.w1), torch.view_as_complex(self.w2)
        out[..., :3, :3] = torch.einsum("bixy,ioxy->boxy", spectrum[..., :3, :3], one)
        out[..., -3:, :3] = torch.einsum("bixy,ioxy->boxy", spectrum[..., -3:, :3], two)
        return self.out(F.gelu(torch.fft.irfft2(out, s=x.shape[-2:])))


class S4D(nn.Module):
    """A diagonal state space model as a convolution by FFT."""

    def __init__(self, width=4, states=8):
        super().__init__()
        self.log_dt = nn.Parameter(torch.rand(width) * 2 - 4)
        self.c = nn.Parameter(torch.view_as_real(torch.randn(width, states, dtype=torch.cfloat)))
        self.log_a_real = nn.Parameter(torch.log(0.5 * torch.ones(width, states)))
        self.a_imag = nn.Parameter(torch.pi * torch.arange(states).float().repeat(width, 1))
        self.d = nn.Parameter(torch.randn(width))

    def forward(self, u):
        length = u.size(-1)
        dt = torch.exp(self.log_dt)
        a = -torch.exp(self.log_a_real) + 1j * self.a_imag
        dt_a = a * dt.unsqueeze(-1)
        c = torch.view_as_complex(self.c) * (torch.exp(dt_a) - 1.0) / a
        power = dt_a.unsqueeze(-1) * torch.arange(length)
        kernel = 2 * torch.einsum("hn,hnl->hl", c, torch.exp(power)).real
        k_f = torch.fft.rfft(kernel, n=2 * length)
        u_f = torch.fft.rfft(u, n=2 * length)
        return torch.fft.irfft(u_f * k_f, n=2 * length)[..., :length] + u * self.d.unsqueeze(-1)


class Vocoder(nn.Module):
    """Magnitude and phase to a waveform, as Vocos and iSTFTNet do."""

    def __init__(self, n_fft=16, hop=4):
        super().__init__()
        self.n_fft, self.hop = n_fft, hop
        self.net = nn.Conv1d(5, n_fft + 2, 3, padding=1)
        self.register_buffer("window", torch.hann_window(n_fft))

    def forward(self, mel):
        magnitude, phase = self.net(mel).chunk(2, 1)
        spectrum = torch.exp(magnitude).clamp(max=1e2) * (torch.cos(phase) + 1j * torch.sin(phase))
        return torch.istft(spectrum, self.n_fft, self.hop, self.n_fft, self.window, center=True)


class SpectralLoss(nn.Module):
    """A multi-resolution STFT loss on a small filter."""

    def __init__(self):
        super().__init__()
        self.filter = nn.Conv1d(1, 1, 5, padding=2)

    def forward(self, x, y):
        made = self.filter(x.unsqueeze(1)).squeeze(1)
        total = 0.0
        for n_fft in (16, 32):
            window = torch.hann_window(n_fft)
            one = torch.stft(made, n_fft, n_fft // 4, window=window, return_complex=True).abs()
            two = torch.stft(y, n_fft, n_fft // 4, window=window, return_complex=True).abs()
            total = total + F.l1_loss(torch.log(one + 1e-3), torch.log(two + 1e-3))
        return total


class GlobalFilter(nn.Module):
    """GFNet: a learned filter on the image's spectrum."""

    def __init__(self, size=8, width=6):
        super().__init__()
        self.filter = nn.Parameter(torch.randn(size, size // 2 + 1, width, 2) * 0.02)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 3)

    def forward(self, x):
        spectrum = torch.fft.rfft2(x, dim=(1, 2), norm="ortho") * torch.view_as_complex(self.filter)
        x = torch.fft.irfft2(spectrum, s=x.shape[1:3], dim=(1, 2), norm="ortho")
        return self.head(self.norm(x).mean((1, 2)))


class FNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.norm = nn.LayerNorm(width)
        self.mix, self.head = mlp(width, 16, width, act=nn.GELU), nn.Linear(width, 20)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = self.norm(x + torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real)
        return self.head(x + self.mix(x))


class Siren(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 16), nn.Linear(16, 16)])
        self.out = nn.Linear(16, 3)
        for layer in self.layers[1:]:
            nn.init.uniform_(layer.weight, -math.sqrt(6 / 16) / 30, math.sqrt(6 / 16) / 30)
        nn.init.uniform_(self.layers[0].weight, -1 / 2, 1 / 2)

    def forward(self, coordinates):
        x = coordinates
        for layer in self.layers:
            x = torch.sin(30 * layer(x))
        return self.out(x)


class Nerf(nn.Module):
    """Positional encoding and volume rendering with exclusive products."""

    def __init__(self):
        super().__init__()
        self.net = mlp(3 * 2 * 4 + 3, 16, 16, 4, act=nn.ReLU)

    def forward(self, origins, directions):
        depth = torch.linspace(1.0, 4.0, 8)
        points = origins[:, None] + directions[:, None] * depth[None, :, None]
        bands = [f(points * 2.0**i) for i in range(4) for f in (torch.sin, torch.cos)]
        raw = self.net(torch.cat([points, *bands], -1))
        colour, density = torch.sigmoid(raw[..., :3]), F.relu(raw[..., 3])
        spacing = torch.cat([depth[1:] - depth[:-1], torch.tensor([1e10])]).expand(density.shape)
        alpha = 1 - torch.exp(-density * spacing)
        through = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], -1), -1)[:, :-1]
        return (colour * (alpha * through)[..., None]).sum(1)


class NeuralOde(nn.Module):
    """Runge-Kutta with fixed steps."""

    def __init__(self):
        super().__init__()
        self.field = mlp(3, 16, 2)

    def forward(self, x):
        dt = 0.1
        for i in range(5):
            t = torch.full_like(x[:, :1], i * dt)

            def f(s, t=t):
                return self.field(torch.cat([s, t], 1))

            k1 = f(x)
            k2 = f(x + dt / 2 * k1)
            k3 = f(x + dt / 2 * k2)
            k4 = f(x + dt * k3)
            x = x + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return x


class Equilibrium(nn.Module):
    """A fixed point by iteration; the gradient of its last step only, as in jacobian-free backpropagation."""

    def __init__(self, width=6):
        super().__init__()
        self.w = nn.utils.parametrizations.spectral_norm(nn.Linear(width, width))
        self.u, self.out = nn.Linear(4, width), nn.Linear(width, 2)

    def forward(self, x):
        z = torch.zeros(x.shape[0], self.u.out_features)
        inject = self.u(x)
        with torch.no_grad():
            for _ in range(10):
                z = torch.tanh(0.5 * self.w(z) + inject)
        return self.out(torch.tanh(0.5 * self.w(z) + inject))


class Kan(nn.Module):
    """Kolmogorov-Arnold layers over B-splines."""

    def __init__(self, sizes=(3, 5, 2), grid=4, order=3):
        super().__init__()
        self.order = order
        knots = torch.arange(-order, grid + order + 1) * (2.0 / grid) - 1.0
        self.register_buffer("knots", knots)
        pairs = list(itertools.pairwise(sizes))
        self.base = nn.ParameterList(nn.Parameter(torch.randn(o, i) * 0.3) for i, o in pairs)
        self.spline = nn.ParameterList(nn.Parameter(torch.randn(o, i, grid + order) * 0.3) for i, o in pairs)

    def bases(self, x):
        x, g = x.unsqueeze(-1), self.knots
        b = ((x >= g[:-1]) & (x < g[1:])).to(x.dtype)
        for k in range(1, self.order + 1):
            left = (x - g[: -(k + 1)]) / (g[k:-1] - g[: -(k + 1)]) * b[..., :-1]
            right = (g[k + 1 :] - x) / (g[k + 1 :] - g[1:-k]) * b[..., 1:]
            b = left + right
        return b

    def forward(self, x):
        for base, spline in zip(self.base, self.spline):
            x = F.linear(F.silu(x), base) + torch.einsum("big,oig->bo", self.bases(torch.tanh(x)), spline)
        return x


class Hyperbolic(nn.Module):
    """Distances in the Poincaré ball."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 3)
        self.centres = nn.Parameter(torch.randn(5, 3) * 0.1)

    def forward(self, x):
        v = self.embed(x)
        norm = v.norm(dim=-1, keepdim=True).clamp_min(1e-6)
        p = torch.tanh(norm) * v / norm * 0.9
        c = self.centres / (1 + self.centres.norm(dim=-1, keepdim=True))
        apart = (p[:, None] - c[None]).pow(2).sum(-1)
        spread = (1 - p.pow(2).sum(-1))[:, None] * (1 - c.pow(2).sum(-1))[None]
        return -torch.acosh(1 + 2 * apart / spread.clamp_min(1e-6) + 1e-6)


class Equivariant(nn.Module):
    """EGNN: messages from distances, positions moved along differences."""

    def __init__(self, width=6):
        super().__init__()
        self.edge, self.node = (
            mlp(2 * width + 1, 12, width, act=nn.SiLU),
            mlp(2 * width, 12, width, act=nn.SiLU),
        )
        self.move = nn.Linear(width, 1, bias=False)

    def forward(self, h, x):
        apart = x.unsqueeze(2) - x.unsqueeze(1)
        d = apart.square().sum(-1, keepdim=True)
        n = h.shape[1]
        pairs = torch.cat([h.unsqueeze(2).expand(-1, -1, n, -1), h.unsqueeze(1).expand(-1, n, -1, -1), d], -1)
        m = self.edge(pairs) * (1 - torch.eye(n)).unsqueeze(-1)
        x = x + (apart * self.move(m)).mean(2)
        return h + self.node(torch.cat([h, m.sum(2)], -1)), x


class Rotations(nn.Module):
    """Six numbers to a rotation, by Gram-Schmidt; a point cloud is turned by it."""

    def __init__(self):
        super().__init__()
        self.net = mlp(9, 16, 6, act=nn.ReLU)

    def forward(self, points):
        six = self.net(points[:, :3].flatten(1))
        a, b = six[:, :3], six[:, 3:]
        one = F.normalize(a, dim=-1)
        two = F.normalize(b - (one * b).sum(-1, keepdim=True) * one, dim=-1)
        turn = torch.stack([one, two, torch.cross(one, two, dim=-1)], -1)
        return torch.bmm(points, turn)


FAMILIES = {
    "pinn": lambda: (PhysicsInformed(), lambda n: (torch.randn(n, 1), torch.rand(n, 1))),
    "wgan_gp": lambda: (
        Critic(),
        lambda n: (torch.randn(n, 1, 8, 8), torch.randn(n, 1, 8, 8), torch.rand(n, 1, 1, 1)),
    ),
    "interatomic_forces": lambda: (Energy(), lambda n: (torch.randint(0, 5, (n, 6)), torch.randn(n, 6, 3))),
    "hamiltonian": lambda: (Hamiltonian(), lambda n: (torch.randn(n, 4),)),
    "score_matching": lambda: (ScoreMatching(), lambda n: (torch.randn(n, 3),)),
    "maml": lambda: (
        Maml(),
        lambda n: (torch.randn(n, 3), torch.randn(n, 1), torch.randn(n, 3), torch.randn(n, 1)),
    ),
    "fno": lambda: (Fno(), lambda n: (torch.randn(n, 16, 1),)),
    "fno2d": lambda: (Fno2d(), lambda n: (torch.randn(n, 1, 8, 8),)),
    "s4d": lambda: (S4D(), lambda n: (torch.randn(n, 4, 12),)),
    "istft_vocoder": lambda: (Vocoder(), lambda n: (torch.randn(n, 5, 10),)),
    "stft_loss": lambda: (SpectralLoss(), lambda n: (torch.randn(n, 128), torch.randn(n, 128))),
    "gfnet": lambda: (GlobalFilter(), lambda n: (torch.randn(n, 8, 8, 6),)),
    "fnet": lambda: (FNet(), lambda n: (torch.randint(0, 20, (n, 9)),)),
    "siren": lambda: (Siren(), lambda n: (torch.rand(n, 2) * 2 - 1,)),
    "nerf": lambda: (Nerf(), lambda n: (torch.randn(n, 3), F.normalize(torch.randn(n, 3), dim=-1))),
    "neural_ode": lambda: (NeuralOde(), lambda n: (torch.randn(n, 2),)),
    "deep_equilibrium": lambda: (Equilibrium(), lambda n: (torch.randn(n, 4),)),
    "kan": lambda: (Kan(), lambda n: (torch.randn(n, 3),)),
    "hyperbolic": lambda: (Hyperbolic(), lambda n: (torch.randn(n, 4),)),
    "egnn": lambda: (Equivariant(), lambda n: (torch.randn(n, 5, 6), torch.randn(n, 5, 3))),
    "rotation_6d": lambda: (Rotations(), lambda n: (torch.randn(n, 5, 3),)),
}
