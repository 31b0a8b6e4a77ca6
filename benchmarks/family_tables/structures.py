"""Networks of graphs, sets, points, tables and other networks; and modules in other types of numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class GraphConv(nn.Module):
    """Kipf's GCN: messages along edges, summed where they end, normalized by degrees."""

    def __init__(self, features=5, width=8):
        super().__init__()
        self.one, self.two = nn.Linear(features, width, bias=False), nn.Linear(width, 3, bias=False)
        self.bias = nn.Parameter(torch.zeros(width))

    @staticmethod
    def propagate(x, edges):
        source, target = edges
        degree = torch.zeros(x.size(0)).index_add_(0, target, torch.ones(target.size(0))) + 1
        norm = degree.rsqrt()
        messages = x[source] * (norm[source] * norm[target]).unsqueeze(-1)
        return torch.zeros_like(x).index_add_(0, target, messages) + x / degree.unsqueeze(-1)

    def forward(self, x, edges):
        x = F.relu(self.propagate(self.one(x), edges) + self.bias)
        return self.propagate(self.two(x), edges)


class GraphAttention(nn.Module):
    """GAT: a softmax over each node's edges, with the maximum taken out."""

    def __init__(self, features=5, heads=2, width=4):
        super().__init__()
        self.project = nn.Linear(features, heads * width, bias=False)
        self.source, self.target = (nn.Parameter(torch.randn(1, heads, width) * 0.3) for _ in range(2))
        self.heads, self.width = heads, width

    def forward(self, x, edges):
        n = x.size(0)
        h = self.project(x).view(n, self.heads, self.width)
        score = (h * self.source).sum(-1)[edges[0]] + (h * self.target).sum(-1)[edges[1]]
        score = F.leaky_relu(score, 0.2)
        index = edges[1].unsqueeze(-1).expand_as(score)
        top = torch.full((n, self.heads), -torch.inf).scatter_reduce(0, index, score, "amax")
        weight = (score - top[edges[1]].detach()).exp()
        total = torch.zeros(n, self.heads).scatter_add(0, index, weight)
        weight = weight / (total[edges[1]] + 1e-16)
        out = torch.zeros(n, self.heads, self.width)
        out = out.index_add(0, edges[1], h[edges[0]] * weight.unsqueeze(-1))
        return F.elu(out.flatten(1))


class GraphPool(nn.Module):
    """GIN over a batch of graphs, pooled by the number of each node's graph; as many graphs as there are labels."""

    def __init__(self, features=5, width=8):
        super().__init__()
        self.eps = nn.Parameter(torch.zeros(1))
        self.mlp = nn.Sequential(
            nn.Linear(features, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width)
        )
        self.head = nn.Linear(2 * width, 3)

    def forward(self, x, edges, graph, labels):
        around = torch.zeros_like(x).scatter_add_(0, edges[1].view(-1, 1).expand(-1, x.size(1)), x[edges[0]])
        x = self.mlp((1 + self.eps) * x + around)
        index = graph.view(-1, 1).expand_as(x)
        empty = x.new_zeros(labels.size(0), x.size(1))
        mean = empty.scatter_reduce(0, index, x, "mean", include_self=False)
        largest = empty.scatter_reduce(0, index, x, "amax", include_self=False)
        return F.cross_entropy(self.head(torch.cat([mean, largest], 1)), labels)


class Graphormer(nn.Module):
    """Attention over all nodes, biased by the length of the shortest path and by degrees."""

    def __init__(self, width=8, heads=2):
        super().__init__()
        self.node, self.degree, self.path = (
            nn.Linear(5, width),
            nn.Embedding(8, width),
            nn.Embedding(6, heads),
        )
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.heads, self.head = heads, nn.Linear(width, 1)

    def forward(self, x, degree, distance):
        h = self.node(x) + self.degree(degree)
        bias = self.path(distance).permute(0, 3, 1, 2).flatten(0, 1)
        y, _ = self.attention(h, h, h, attn_mask=bias, need_weights=False)
        return self.head(h + y).squeeze(-1)


class DynamicEdges(nn.Module):
    """DGCNN: edges to the nearest points in the space of features."""

    def __init__(self, k=3):
        super().__init__()
        self.k = k
        self.one = nn.Sequential(nn.Conv2d(6, 8, 1, bias=False), nn.BatchNorm2d(8), nn.LeakyReLU(0.2))
        self.two, self.head = nn.Conv2d(16, 8, 1), nn.Linear(8, 4)

    def edges(self, x):
        inner = -2 * torch.matmul(x.transpose(2, 1), x)
        square = torch.sum(x**2, dim=1, keepdim=True)
        index = (-square - inner - square.transpose(2, 1)).topk(k=self.k, dim=-1)[1]
        b, c, n = x.shape
        index = (index + torch.arange(0, b).view(-1, 1, 1) * n).view(-1)
        x = x.transpose(2, 1).contiguous()
        feature = x.view(b * n, -1)[index, :].view(b, n, self.k, c)
        x = x.view(b, n, 1, c).repeat(1, 1, self.k, 1)
        return torch.cat((feature - x, x), dim=3).permute(0, 3, 1, 2).contiguous()

    def forward(self, points):
        x = self.one(self.edges(points)).max(dim=-1)[0]
        x = F.leaky_relu(self.two(self.edges(x))).max(dim=-1)[0]
        return self.head(F.adaptive_max_pool1d(x, 1).squeeze(-1))


class PointNet(nn.Module):
    """With the network that turns its input, and its penalty."""

    def __init__(self):
        super().__init__()
        self.turn = nn.Sequential(nn.Conv1d(3, 8, 1), nn.ReLU())
        self.turn_head, self.conv, self.head = nn.Linear(8, 9), nn.Conv1d(3, 16, 1), nn.Linear(16, 4)

    def forward(self, points, labels):
        turn = self.turn_head(torch.max(self.turn(points), 2)[0]).view(-1, 3, 3) + torch.eye(3)
        x = torch.bmm(points.transpose(2, 1), turn).transpose(2, 1)
        x = torch.max(F.relu(self.conv(x)), 2, keepdim=True)[0].view(-1, 16)
        apart = torch.bmm(turn, turn.transpose(2, 1)) - torch.eye(3)[None]
        penalty = torch.mean(torch.norm(apart, dim=(1, 2)))
        return F.nll_loss(F.log_softmax(self.head(x), dim=1), labels) + 0.001 * penalty


class DeepSets(nn.Module):
    """A sum and a maximum over the members that are there."""

    def __init__(self):
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(3, 8), nn.ELU(), nn.Linear(8, 8), nn.ELU())
        self.rho = nn.Linear(16, 2)

    def forward(self, x, sizes):
        mask = (torch.arange(x.size(1)) < sizes.unsqueeze(1)).unsqueeze(-1)
        h = self.phi(x)
        largest = h.masked_fill(~mask, float("-inf")).max(1).values
        return self.rho(torch.cat([(h * mask).sum(1), largest], -1))


class SetTransformer(nn.Module):
    """Induced attention and pooling by seeds."""

    def __init__(self, width=8):
        super().__init__()
        self.lift = nn.Linear(3, width)
        self.inducing, self.seeds = (
            nn.Parameter(torch.empty(1, 4, width)),
            nn.Parameter(torch.empty(1, 2, width)),
        )
        nn.init.xavier_uniform_(self.inducing)
        nn.init.xavier_uniform_(self.seeds)
        self.parts = nn.ModuleList(nn.ModuleList(nn.Linear(width, width) for _ in range(4)) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))

    def attend(self, i, query, key):
        q, k, v, o = self.parts[i]
        query, key, value = q(query), k(key), v(key)
        heads = [torch.cat(t.split(4, 2), 0) for t in (query, key, value)]
        weights = torch.softmax(heads[0].bmm(heads[1].transpose(1, 2)) / query.size(-1) ** 0.5, 2)
        out = torch.cat((heads[0] + weights.bmm(heads[2])).split(query.size(0), 0), 2)
        return self.norms[i](out + F.relu(o(out)))

    def forward(self, x):
        x = self.lift(x)
        h = self.attend(0, self.inducing.repeat(x.size(0), 1, 1), x)
        x = self.attend(1, x, h)
        return self.attend(2, self.seeds.repeat(x.size(0), 1, 1), x).flatten(1)


class SlotAttention(nn.Module):
    """Slots compete for inputs over three rounds of a GRU cell; their first guess is learned."""

    def __init__(self, slots=3, width=6):
        super().__init__()
        self.start, self.width = nn.Parameter(torch.randn(1, slots, width)), width
        self.norm, self.slot_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.gru, self.mlp = (
            nn.GRUCell(width, width),
            nn.Sequential(nn.Linear(width, 12), nn.ReLU(), nn.Linear(12, width)),
        )

    def forward(self, x):
        b, _, d = x.shape
        slots, x = self.start.expand(b, -1, -1), self.norm(x)
        k, v = self.k(x), self.v(x)
        for _ in range(3):
            before = slots
            dots = torch.einsum("bid,bjd->bij", self.q(self.slot_norm(slots)), k) * d**-0.5
            weights = dots.softmax(dim=1) + 1e-8
            weights = weights / weights.sum(dim=-1, keepdim=True)
            updates = torch.einsum("bjd,bij->bid", v, weights)
            slots = self.gru(updates.reshape(-1, d), before.reshape(-1, d)).reshape(b, -1, d)
            slots = slots + self.mlp(slots)
        return slots


class HyperNetwork(nn.Module):
    """Weights of one layer come out of another, for each example."""

    def __init__(self):
        super().__init__()
        self.make = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3 * 4 + 4))

    def forward(self, x, task):
        weights = self.make(task)
        w, b = weights[:, :12].view(-1, 4, 3), weights[:, 12:]
        return torch.tanh(torch.bmm(w, x.unsqueeze(-1)).squeeze(-1) + b)


class SortedExperts(nn.Module):
    """Tokens sorted by expert, counted, computed expert by expert and put back."""

    def __init__(self, width=6, experts=3):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 8) * 0.3)
        self.down = nn.Parameter(torch.randn(experts, 8, width) * 0.3)
        self.experts = experts

    def forward(self, x):
        flat = x.reshape(-1, x.size(-1))
        weights, chosen = self.router(flat).softmax(-1).topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.view(-1).argsort(stable=True)
        counts = torch.bincount(chosen.view(-1), minlength=self.experts)
        ends = counts.cumsum(0)
        token = order // 2
        rows = flat[token]
        number = torch.arange(rows.size(0))
        out = torch.zeros_like(rows)
        for e in range(self.experts):
            inside = ((number < ends[e]) & (number >= ends[e] - counts[e])).unsqueeze(-1)
            out = out + torch.where(inside, F.silu(rows @ self.up[e]) @ self.down[e], torch.zeros_like(rows))
        out = out * weights.view(-1)[order].unsqueeze(-1)
        return torch.zeros_like(flat).index_add(0, token, out).view_as(x)


class LoopedExperts(nn.Module):
    """Mixtral's experts before they were fused: each takes the tokens that chose it."""

    def __init__(self, width=6, experts=3):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 8), nn.SiLU(), nn.Linear(8, width)) for _ in range(experts)
        )

    def forward(self, x):
        b, t, d = x.shape
        flat = x.view(-1, d)
        weights, chosen = torch.topk(F.softmax(self.router(flat), dim=1), 2, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        final = torch.zeros((b * t, d))
        mask = F.one_hot(chosen, num_classes=len(self.experts)).permute(2, 1, 0)
        for e, expert in enumerate(self.experts):
            rank, rows = torch.where(mask[e])
            final.index_add_(0, rows, expert(flat[None, rows].reshape(-1, d)) * weights[rows, rank, None])
        return final.reshape(b, t, d)


class SwitchExperts(nn.Module):
    """Switch Transformer: one expert for each token, up to its capacity, and a loss that balances them."""

    def __init__(self, width=6, experts=3, capacity=6):
        super().__init__()
        self.router, self.capacity = nn.Linear(width, experts), capacity
        self.w = nn.Parameter(torch.randn(experts, width, width) * 0.3)

    def forward(self, x, y):
        flat = x.reshape(-1, x.size(-1))
        p = self.router(flat).softmax(-1)
        gate, expert = p.max(-1)
        chosen = F.one_hot(expert, p.size(-1)).float()
        position = (chosen.cumsum(0) * chosen - chosen).sum(-1).long()
        keep = (position < self.capacity).float()
        dispatch = chosen.unsqueeze(-1) * F.one_hot(
            position.clamp(max=self.capacity - 1), self.capacity
        ).unsqueeze(1)
        dispatch = dispatch * keep.view(-1, 1, 1)
        boxes = torch.einsum("td,tec->ecd", flat, dispatch)
        out = torch.einsum("ecd,tec->td", torch.relu(torch.bmm(boxes, self.w)), dispatch) * gate.unsqueeze(-1)
        balance = p.size(-1) * (chosen.mean(0) * p.mean(0)).sum()
        return F.mse_loss(out.view_as(x), y) + 0.01 * balance


class Recommender(nn.Module):
    """DLRM: bags of categories, weighted, and products of all pairs."""

    def __init__(self, width=4):
        super().__init__()
        self.bags = nn.EmbeddingBag(30, width, mode="sum", padding_idx=0, include_last_offset=False)
        self.mean = nn.EmbeddingBag(20, width, mode="mean")
        self.item, self.dense = (
            nn.Embedding(10, width),
            nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, width)),
        )
        self.top = nn.Linear(6 + width, 1)

    def forward(self, dense, clicks, offsets, weights, tags, item):
        vectors = [
            self.dense(dense),
            self.bags(clicks, offsets, per_sample_weights=weights),
            self.mean(tags),
            self.item(item),
        ]
        stack = torch.stack(vectors, 1)
        products = torch.bmm(stack, stack.mT)
        row, column = torch.tril_indices(4, 4, offset=-1)
        return self.top(torch.cat([vectors[0], products[:, row, column]], 1)).sigmoid().squeeze(1)


class Factorization(nn.Module):
    """DeepFM: fields with offsets into one table, the square of the sum less the sum of squares."""

    def __init__(self, fields=(5, 7, 3), width=4):
        super().__init__()
        self.register_buffer("offsets", torch.tensor((0, *fields[:-1])).cumsum(0))
        self.linear, self.embed = nn.Embedding(sum(fields), 1), nn.Embedding(sum(fields), width)
        self.mlp = nn.Sequential(nn.Linear(3 * width, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x, y):
        x = x + self.offsets.unsqueeze(0)
        v = self.embed(x)
        pairs = (v.sum(1) ** 2 - (v**2).sum(1)).sum(1, keepdim=True)
        score = self.linear(x).sum(1) + 0.5 * pairs + self.mlp(v.flatten(1))
        return F.binary_cross_entropy_with_logits(score.squeeze(1), y)


class Words(nn.Module):
    """A language model over a large vocabulary: AdaptiveLogSoftmaxWithLoss."""

    def __init__(self):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(60, 8), nn.LSTM(8, 8, batch_first=True)
        self.out = nn.AdaptiveLogSoftmaxWithLoss(8, 60, cutoffs=[10, 30], div_value=2.0)

    def forward(self, tokens, following):
        h, _ = self.rnn(self.embed(tokens))
        return self.out(h.reshape(-1, 8), following.reshape(-1)).loss


class Skipgram(nn.Module):
    """word2vec with negative samples."""

    def __init__(self):
        super().__init__()
        self.centre, self.context = nn.Embedding(20, 6), nn.Embedding(20, 6)

    def forward(self, centre, context, negatives):
        v = self.centre(centre)
        right = F.logsigmoid((v * self.context(context)).sum(-1))
        wrong = F.logsigmoid(-torch.bmm(self.context(negatives), v.unsqueeze(2)).squeeze(2)).sum(-1)
        return -(right + wrong).mean()


class TabNet(nn.Module):
    """Sparsemax masks and batch norm over virtual batches of two parts."""

    def __init__(self, features=6):
        super().__init__()
        self.norm, self.ghost = nn.BatchNorm1d(features), nn.BatchNorm1d(features)
        self.attend, self.step, self.head = nn.Linear(4, features), nn.Linear(features, 8), nn.Linear(4, 2)

    @staticmethod
    def sparsemax(z):
        ordered = z.sort(dim=-1, descending=True)[0]
        k = torch.arange(1, z.size(-1) + 1, dtype=z.dtype)
        support = 1 + k * ordered > ordered.cumsum(-1)
        count = support.sum(-1, keepdim=True)
        tau = (ordered.cumsum(-1).gather(-1, count - 1) - 1) / count.to(z.dtype)
        return torch.clamp(z - tau, min=0)

    def forward(self, x):
        x = self.norm(x)
        a, prior, total = F.glu(self.step(x)), torch.ones_like(x), 0
        for _ in range(2):
            parts = [self.ghost(part) for part in self.attend(a).chunk(2, 0)]
            mask = self.sparsemax(torch.cat(parts, 0) * prior)
            prior = prior * (1.3 - mask)
            a = F.glu(self.step(mask * x))
            total = total + F.relu(a)
        return self.head(total)


class TableTransformer(nn.Module):
    """FT-Transformer: a token for each column, and one for the class."""

    def __init__(self, width=8):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(3, width)), nn.Parameter(torch.randn(5, width))
        self.embed, self.cls = nn.Embedding(9, width), nn.Parameter(torch.randn(width))
        self.register_buffer("offsets", torch.tensor([0, 4]))
        self.layer = nn.TransformerEncoderLayer(width, 2, 16, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, numbers, categories):
        tokens = (
            torch.cat([self.weight[None] * numbers[..., None], self.embed(categories + self.offsets)], 1)
            + self.bias
        )
        x = torch.cat([tokens, self.cls.expand(len(tokens), 1, -1)], 1)
        return self.head(F.relu(self.layer(x)[:, -1])).squeeze(-1)


class SoftTree(nn.Module):
    """A soft decision tree: products of the choices on the way to each leaf."""

    def __init__(self, depth=3):
        super().__init__()
        self.choose, self.leaves, self.depth = (
            nn.Linear(4, 2**depth - 1),
            nn.Parameter(torch.randn(2**depth, 3)),
            depth,
        )

    def forward(self, x):
        p = torch.sigmoid(self.choose(x))
        p = torch.stack([p, 1 - p], 2)
        path, begin = x.new_ones(x.size(0), 1, 1), 0
        for level in range(self.depth):
            end = begin + 2**level
            path = path.view(x.size(0), -1, 1).repeat(1, 1, 2) * p[:, begin:end]
            begin = end
        return path.view(x.size(0), -1) @ self.leaves.softmax(-1)


class Adaptive(nn.Module):
    """A number of rounds that the data choose, by torch.cond."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        def far(x):
            return torch.tanh(self.one(x))

        def near(x):
            return x + torch.sin(self.two(x))

        return torch.cond(x.abs().mean() > 0.5, far, near, (x,))


class Scanned(nn.Module):
    """A recurrence by torch's scan, with parameters from outside."""

    def __init__(self, width=4):
        super().__init__()
        self.w, self.u = nn.Parameter(torch.randn(width, width) * 0.3), nn.Linear(3, width)

    def forward(self, x):
        from torch._higher_order_ops.scan import scan

        def step(h, u):
            h = torch.tanh(h @ self.w + u)
            return h, h.clone()

        inputs = self.u(x).transpose(0, 1)
        _, states = scan(step, torch.zeros_like(inputs[0]), inputs)
        return states.transpose(0, 1)


class ComplexNet(nn.Module):
    """Complex layers with modReLU, as in unitary recurrent networks."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 6, dtype=torch.cfloat)
        self.bias = nn.Parameter(torch.full((6,), -0.1))
        self.two = nn.Linear(6, 3, dtype=torch.cfloat)

    def forward(self, real, imaginary):
        z = self.one(torch.complex(real, imaginary))
        size = z.abs()
        z = z * (F.relu(size + self.bias) / (size + 1e-6))
        out = self.two(z)
        return torch.cat([out.real, out.imag], -1)


class Doubles(nn.Module):
    """A module in float64."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.GELU(), nn.Flatten(), nn.Linear(24, 3)
        ).double()

    def forward(self, x):
        return self.net(x)


class Halves(nn.Module):
    """A small transformer in 16 bits."""

    def __init__(self, dtype):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(4, 8),
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True),
            nn.LayerNorm(8),
            nn.Linear(8, 3),
        ).to(dtype)

    def forward(self, x):
        return self.net(x)


class Autocast(nn.Module):
    """A region of forward in bfloat16."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.computes_in = nn.Linear(4, 8), nn.Linear(8, 2), torch.bfloat16

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = F.relu(self.one(x))
        return self.two(h.float())


class FakeQuantized(nn.Module):
    """Training for 8 bits: rounding with the range that observers have seen."""

    def __init__(self):
        super().__init__()
        from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 2)
        self.rounding = FakeQuantize(
            MovingAverageMinMaxObserver, 0, 255, dtype=torch.quint8, averaging_constant=0.1
        )

    def forward(self, x):
        return self.two(self.rounding(F.relu(self.one(x))))


def _graph(nodes, edges):
    return torch.randn(nodes, 5), torch.randint(0, nodes, (2, edges))


def _graphs(n):
    x, edges = _graph(3 * n, 8 * n)
    return x, edges, torch.arange(3 * n) // 3, torch.randint(0, 3, (n,))


def _clicks(n):
    counts = torch.randint(1, 4, (n,))
    total = int(counts.sum())
    return (
        torch.randn(n, 3), torch.randint(0, 30, (total,)), counts.cumsum(0) - counts, torch.rand(total),
        torch.randint(0, 20, (n, 3)), torch.randint(0, 10, (n,)),
    )  # fmt: skip


class Quaternions(nn.Module):
    """Linear layers of quaternions: Hamilton products written as one matrix of four blocks."""

    def __init__(self, one=2, two=3):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(two, one) * 0.4 for _ in range(4))
        self.read = nn.Linear(4 * two, 2)

    def forward(self, x):
        r, i, j, k = self.weights
        rows = [
            torch.cat([r, -i, -j, -k], 1),
            torch.cat([i, r, -k, j], 1),
            torch.cat([j, k, r, -i], 1),
            torch.cat([k, -j, i, r], 1),
        ]
        h = F.linear(x, torch.cat(rows, 0))
        size = h.view(h.size(0), 4, -1).norm(dim=1, keepdim=True)
        return self.read((h.view(h.size(0), 4, -1) / (1 + size)).flatten(1))


FAMILIES = {
    "gcn": lambda: (GraphConv(), lambda n: _graph(n + 2, 3 * n)),
    "gat": lambda: (GraphAttention(), lambda n: _graph(n + 2, 3 * n)),
    "gin_pooled": lambda: (GraphPool(), _graphs),
    "graphormer": lambda: (
        Graphormer(),
        lambda n: (torch.randn(n, 6, 5), torch.randint(0, 8, (n, 6)), torch.randint(0, 6, (n, 6, 6))),
    ),
    "dgcnn": lambda: (DynamicEdges(), lambda n: (torch.randn(n, 3, 9),)),
    "pointnet": lambda: (PointNet(), lambda n: (torch.randn(n, 3, 9), torch.randint(0, 4, (n,)))),
    "deep_sets": lambda: (DeepSets(), lambda n: (torch.randn(n, 6, 3), torch.randint(1, 7, (n,)))),
    "set_transformer": lambda: (SetTransformer(), lambda n: (torch.randn(n, 6, 3),)),
    "slot_attention": lambda: (SlotAttention(), lambda n: (torch.randn(n, 7, 6),)),
    "hypernetwork": lambda: (HyperNetwork(), lambda n: (torch.randn(n, 3), torch.randn(n, 2))),
    "experts_sorted": lambda: (SortedExperts(), lambda n: (torch.randn(n, 5, 6),)),
    "experts_looped": lambda: (LoopedExperts(), lambda n: (torch.randn(n, 5, 6),)),
    "experts_switch": lambda: (SwitchExperts(), lambda n: (torch.randn(n, 5, 6), torch.randn(n, 5, 6))),
    "dlrm_bags": lambda: (Recommender(), _clicks),
    "deepfm": lambda: (
        Factorization(),
        lambda n: (torch.stack([torch.randint(0, s, (n,)) for s in (5, 7, 3)], 1), torch.randint(0, 2, (n,)).float()),
    ),
    "adaptive_softmax": lambda: (Words(), lambda n: (torch.randint(0, 60, (n, 5)), torch.randint(0, 60, (n, 5)))),
    "word2vec": lambda: (
        Skipgram(),
        lambda n: (torch.randint(0, 20, (n,)), torch.randint(0, 20, (n,)), torch.randint(0, 20, (n, 5))),
    ),
    "tabnet": lambda: (TabNet(), lambda n: (torch.randn(2 * n, 6),)),
    "ft_transformer": lambda: (
        TableTransformer(), lambda n: (torch.randn(n, 3), torch.stack([torch.randint(0, s, (n,)) for s in (4, 5)], 1))
    ),
    "soft_tree": lambda: (SoftTree(), lambda n: (torch.randn(n, 4),)),
    "torch_cond": lambda: (Adaptive(), lambda n: (torch.randn(n, 4),)),
    "torch_scan": lambda: (Scanned(), lambda n: (torch.randn(n, 5, 3),)),
    "complex_layers": lambda: (ComplexNet(), lambda n: (torch.randn(n, 4), torch.randn(n, 4))),
    "float64": lambda: (Doubles(), lambda n: (torch.randn(n, 2, 8, dtype=torch.float64),)),
    "bfloat16": lambda: (Halves(torch.bfloat16), lambda n: (torch.randn(n, 5, 4, dtype=torch.bfloat16),)),
    "float16": lambda: (Halves(torch.float16), lambda n: (torch.randn(n, 5, 4, dtype=torch.float16),)),
    "autocast": lambda: (Autocast(), lambda n: (torch.randn(n, 4),)),
    "fake_quantized": lambda: (FakeQuantized(), lambda n: (torch.randn(n, 4),)),
    "quaternions": lambda: (Quaternions(), lambda n: (torch.randn(n, 8),)),
}  # fmt: skip
