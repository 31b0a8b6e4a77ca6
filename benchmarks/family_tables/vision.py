"""Networks of pictures: segmentation, super-resolution, transformers of space, detection heads, capsules."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

# packages without which a family is left out
NEEDS = {
    "roi_align_head": ("torchvision",),
    "retina_loss": ("torchvision",),
    "mixer_stochastic_depth": ("torchvision", "timm"),
}


def block(one: int, two: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(one, two, 3, padding=1), nn.BatchNorm2d(two), nn.ReLU())


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2, self.middle = block(1, 4), block(4, 8), block(8, 16)
        self.up2, self.up1 = nn.ConvTranspose2d(16, 8, 2, 2), nn.ConvTranspose2d(8, 4, 2, 2)
        self.dec2, self.dec1, self.out = block(16, 8), block(8, 4), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        y = self.middle(F.max_pool2d(two, 2))
        y = self.dec2(torch.cat([self.up2(y), two], 1))
        return self.out(self.dec1(torch.cat([self.up1(y), one], 1)))


class UNetLoss(nn.Module):
    """A picture and its mask; Dice and cross entropy inside."""

    def __init__(self):
        super().__init__()
        self.net = UNet()

    def forward(self, image, mask):
        scores = self.net(image)
        p = scores.softmax(1)[:, 1]
        hit = (p * mask).sum((1, 2))
        dice = 1 - (2 * hit + 1) / (p.sum((1, 2)) + mask.sum((1, 2)) + 1)
        return F.cross_entropy(scores, mask) + dice.mean()


class SuperResolution(nn.Module):
    """Twice the size, the target in proportion."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(1, 8, 5, padding=2), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x, y):
        out = F.pixel_shuffle(self.two(F.relu(self.one(x))), 2)
        out = out + F.interpolate(x, scale_factor=2, mode="bicubic", align_corners=False)
        return F.l1_loss(out, y)


class SpatialTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.locate = nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 6))
        self.locate[-1].bias.data = torch.tensor([1.0, 0.1, 0, 0, 1, 0])
        self.head = nn.Conv2d(1, 2, 3)

    def forward(self, x):
        theta = self.locate(x).view(-1, 2, 3)
        grid = F.affine_grid(theta, list(x.size()), align_corners=False)
        return self.head(F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False))


class Flow(nn.Module):
    """Optical flow: a correlation volume and a warp."""

    def __init__(self):
        super().__init__()
        self.features, self.flow = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(9, 2, 3, padding=1)

    def forward(self, one, two):
        f, g = self.features(one), self.features(two)
        h, w = f.shape[2:]
        padded = F.pad(g, (1, 1, 1, 1))
        volume = [(f * padded[:, :, i : i + h, j : j + w]).mean(1) for i in range(3) for j in range(3)]
        flow = self.flow(torch.stack(volume, 1))
        ys, xs = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        grid = torch.stack([xs, ys], -1).to(flow.dtype) + flow.permute(0, 2, 3, 1)
        scale = torch.tensor([2.0 / max(w - 1, 1), 2.0 / max(h - 1, 1)])
        warped = F.grid_sample(two, grid * scale - 1, align_corners=True)
        return (warped - one).abs().mean() + 0.1 * flow.diff(dim=-1).abs().mean()


class Capsules(nn.Module):
    """Dynamic routing with detached votes."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, 2)
        self.w = nn.Parameter(torch.randn(36, 3, 6, 4) * 0.1)

    @staticmethod
    def squash(s):
        square = (s**2).sum(-1, keepdim=True)
        return square / (1 + square) * s / (square + 1e-8).sqrt()

    def forward(self, x):
        u = self.squash(self.first(x).view(x.size(0), 4, 4, -1).permute(0, 1, 3, 2).reshape(x.size(0), -1, 4))
        votes = torch.einsum("icod,bid->bico", self.w, u)
        logits = torch.zeros(x.size(0), 36, 3, 1)
        for i in range(3):
            v = self.squash((logits.softmax(2) * votes).sum(1, keepdim=True))
            if i < 2:
                logits = logits + (votes.detach() * v).sum(-1, keepdim=True)
        return v.squeeze(1).norm(dim=-1)


class Deformable(nn.Module):
    """Deformable DETR's attention in plain torch: a few samples around a reference point, on two levels."""

    def __init__(self, width=8, heads=2, points=3):
        super().__init__()
        self.heads, self.points = heads, points
        self.stem, self.down = nn.Conv2d(3, width, 3, 2, 1), nn.Conv2d(width, width, 3, 2, 1)
        self.query = nn.Parameter(torch.randn(4, width))
        self.reference, self.value = nn.Linear(width, 2), nn.Linear(width, width)
        self.offsets = nn.Linear(width, heads * 2 * points * 2)
        self.weights, self.out = nn.Linear(width, heads * 2 * points), nn.Linear(width, 4)

    def forward(self, x):
        fine = F.relu(self.stem(x))
        levels = [fine, self.down(fine)]
        b, n = x.shape[0], self.query.shape[0]
        q = self.query.unsqueeze(0).expand(b, -1, -1)
        offsets = self.offsets(q).view(b, n, self.heads, 2, self.points, 2)
        weights = self.weights(q).view(b, n, self.heads, 2 * self.points).softmax(-1)
        sizes = torch.tensor([[level.shape[3], level.shape[2]] for level in levels])
        at = (
            self.reference(q).sigmoid()[:, :, None, None, None]
            + offsets / sizes[None, None, None, :, None, :]
        )
        grids, samples = 2 * at - 1, []
        for i, level in enumerate(levels):
            value = self.value(level.flatten(2).transpose(1, 2)).transpose(1, 2)
            value = value.reshape(b * self.heads, -1, *level.shape[2:])
            grid = grids[:, :, :, i].transpose(1, 2).flatten(0, 1)
            samples.append(F.grid_sample(value, grid, "bilinear", "zeros", align_corners=False))
        weights = weights.transpose(1, 2).reshape(b * self.heads, 1, n, 2 * self.points)
        out = (torch.stack(samples, -2).flatten(-2) * weights).sum(-1).view(b, -1, n)
        return self.out(out.transpose(1, 2)).sigmoid()


class RegionHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Conv2d(3, 4, 3, 2, 1)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(4 * 9, 8), nn.ReLU(), nn.Linear(8, 5))

    def forward(self, x, boxes):
        from torchvision.ops import roi_align

        pooled = roi_align(self.backbone(x), boxes, (3, 3), spatial_scale=0.5, sampling_ratio=2)
        return self.head(pooled)


class Retina(nn.Module):
    """Focal loss and generalized IoU on anchors."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Conv2d(3, 8, 3, 4, 1)
        self.classes, self.boxes = nn.Conv2d(8, 3, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x, labels, targets):
        from torchvision.ops import generalized_box_iou_loss, sigmoid_focal_loss

        f = F.relu(self.backbone(x))
        scores = self.classes(f).permute(0, 2, 3, 1).reshape(x.shape[0], -1, 3)
        sides = F.softplus(self.boxes(f)).permute(0, 2, 3, 1).reshape(x.shape[0], -1, 4)
        boxes = torch.cat([-sides[..., :2], sides[..., 2:]], -1)
        focal = sigmoid_focal_loss(scores, labels, reduction="mean")
        giou = generalized_box_iou_loss(boxes.flatten(0, 1), targets.flatten(0, 1), reduction="mean")
        return focal + giou


class Yolo(nn.Module):
    """Boxes from distributions of distances, matched by a mask."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, 4, 1), nn.Conv2d(8, 4 * 4 + 2, 1)
        self.register_buffer("bins", torch.arange(4.0))

    def forward(self, x):
        out = self.head(F.silu(self.stem(x)))
        b, _, h, w = out.shape
        distances = out[:, :16].view(b, 4, 4, h * w).softmax(2).mul(self.bins.view(1, 1, 4, 1)).sum(2)
        ys, xs = torch.meshgrid(torch.arange(h) + 0.5, torch.arange(w) + 0.5, indexing="ij")
        centre = torch.stack([xs, ys]).view(1, 2, -1)
        boxes = torch.cat([centre - distances[:, :2], centre + distances[:, 2:]], 1) * 4
        return torch.cat([boxes, out[:, 16:].flatten(2).sigmoid()], 1)


class Window(nn.Module):
    """Swin: shifted windows with a relative bias."""

    def __init__(self, width=8, size=4):
        super().__init__()
        self.size, self.patch = size, nn.Conv2d(3, width, 2, 2)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.table = nn.Parameter(torch.randn((2 * size - 1) ** 2, 2) * 0.1)
        at = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")).flatten(1)
        apart = (at[:, :, None] - at[:, None]).permute(1, 2, 0) + size - 1
        self.register_buffer("index", apart[..., 0] * (2 * size - 1) + apart[..., 1])

    def forward(self, x):
        x = self.patch(x).permute(0, 2, 3, 1)
        b, h, w, c = x.shape
        s = self.size
        y = torch.roll(x, (-s // 2, -s // 2), (1, 2))
        y = y.view(b, h // s, s, w // s, s, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, s * s, c)
        q, k, v = self.qkv(y).reshape(-1, s * s, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        bias = self.table[self.index.view(-1)].view(s * s, s * s, 2).permute(2, 0, 1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.unsqueeze(0))
        y = self.out(y.transpose(1, 2).reshape(-1, s * s, c))
        y = y.view(b, h // s, w // s, s, s, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        return x + torch.roll(y, (s // 2, s // 2), (1, 2))


class Mixer(nn.Module):
    """MLP-Mixer with rows dropped at one half, by torchvision's layer and by timm's, each too small to be seen."""

    def __init__(self):
        super().__init__()
        from timm.layers import DropPath
        from torchvision.ops import StochasticDepth

        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.tokens, self.channels = nn.Conv1d(16, 16, 1), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.drop, self.path, self.scale = StochasticDepth(0.5, "row"), DropPath(0.5), 1e-9

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = x + F.gelu(self.tokens(self.norm(x)))
        x = x + F.gelu(self.channels(self.norm(x)))
        return (x + self.scale * (self.drop(x) + self.path(x))).mean(1)


class Perceiver(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(5, width))
        self.read = nn.MultiheadAttention(width, 2, kdim=3, vdim=3, batch_first=True)
        self.think = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        z = self.latents.unsqueeze(0).repeat(x.shape[0], 1, 1)
        z = z + self.read(z, x, x, need_weights=False)[0]
        return self.head(self.think(z).mean(1))


class DetrLoss(nn.Module):
    """Object queries over a feature map."""

    def __init__(self, width=8):
        super().__init__()
        self.stem, self.queries = nn.Conv2d(3, width, 4, 4), nn.Embedding(4, width)
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(width, 2, 16, dropout=0.0, batch_first=True), 1
        )
        self.boxes = nn.Linear(width, 4)

    def forward(self, x):
        memory = self.stem(x).flatten(2).transpose(1, 2)
        q = self.queries.weight.unsqueeze(0).expand(x.size(0), -1, -1)
        return self.boxes(self.decoder(q, memory)).sigmoid()


class Squeeze(nn.Module):
    """Mobile blocks with depthwise convolutions, squeeze and excitation, hard activations."""

    def __init__(self):
        super().__init__()
        self.expand, self.depth = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, 2, 1, groups=8, bias=False)
        self.norm = nn.BatchNorm2d(8, momentum=None)
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 2, 1), nn.ReLU(), nn.Conv2d(2, 8, 1), nn.Hardsigmoid()
        )

    def forward(self, x):
        y = F.hardswish(self.norm(self.depth(F.hardswish(self.expand(x)))))
        return (y * self.squeeze(y)).mean((2, 3))


class StyleModulation(nn.Module):
    """StyleGAN2: weights modulated for each example, as one grouped convolution."""

    def __init__(self):
        super().__init__()
        self.style = nn.Linear(5, 3)
        self.weight = nn.Parameter(torch.randn(4, 3, 3, 3))

    def forward(self, x, z):
        b, c, h, w = x.shape
        weight = self.weight[None] * (self.style(z) + 1).view(b, 1, c, 1, 1)
        weight = weight * torch.rsqrt(weight.square().sum((2, 3, 4), keepdim=True) + 1e-8)
        out = F.conv2d(x.reshape(1, b * c, h, w), weight.reshape(b * 4, c, 3, 3), padding=1, groups=b)
        return out.view(b, 4, h, w)


class Involution(nn.Module):
    """Kernels of each place, over unfolded patches."""

    def __init__(self):
        super().__init__()
        self.kernel, self.out = nn.Conv2d(4, 9, 1), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        patches = F.unfold(x, 3, padding=1).view(b, c, 9, h, w)
        return self.out((self.kernel(x).unsqueeze(1) * patches).sum(2))


class BlurPool(nn.Module):
    """Anti-aliased pooling with reflected edges and a fixed kernel."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        k = torch.tensor([1.0, 2.0, 1.0])
        self.register_buffer("k", (k[:, None] * k[None] / 16).repeat(4, 1, 1, 1))

    def forward(self, x):
        y = F.max_pool2d(self.conv(x), 2, 1)
        return F.conv2d(F.pad(y, (1, 1, 1, 1), mode="reflect"), self.k, stride=2, groups=4)


class Video(nn.Module):
    """(2+1)D convolutions with trilinear enlargement."""

    def __init__(self):
        super().__init__()
        self.space, self.time = (
            nn.Conv3d(1, 4, (1, 3, 3), padding=(0, 1, 1)),
            nn.Conv3d(4, 4, (3, 1, 1), padding=(1, 0, 0)),
        )
        self.norm, self.out = nn.GroupNorm(2, 4), nn.Conv3d(4, 1, 1)

    def forward(self, x):
        y = F.avg_pool3d(F.relu(self.norm(self.time(self.space(x)))), 2)
        return self.out(F.interpolate(y, size=x.shape[2:], mode="trilinear", align_corners=False))


def _boxes(n):
    start = torch.rand(n, 2) * 4
    rows = torch.arange(n) % 2
    return torch.cat([rows[:, None].float(), start, start + 2 + torch.rand(n, 2) * 4], 1)


class ConvMixer(nn.Module):
    """Patches mixed by depthwise and pointwise convolutions, with residuals that are dropped at random."""

    def __init__(self, width=8, depth=2, rate=0.5):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 2, 2), nn.GELU(), nn.BatchNorm2d(width))

        def mix(size, groups):
            conv = nn.Conv2d(width, width, size, padding="same", groups=groups)
            return nn.Sequential(conv, nn.GELU(), nn.BatchNorm2d(width))

        self.blocks = nn.ModuleList(nn.ModuleList([mix(5, width), mix(1, 1)]) for _ in range(depth))
        self.head, self.rate = nn.Linear(width, 3), rate

    def drop_path(self, x):
        if not self.training or self.rate == 0.0:
            return x
        mask = x.new_empty(x.size(0), 1, 1, 1).bernoulli_(1 - self.rate)
        return x * mask / (1 - self.rate)

    def forward(self, x):
        x = self.stem(x)
        for space, channels in self.blocks:
            x = channels(x + self.drop_path(space(x)))
        return self.head(x.mean((2, 3)))


FAMILIES = {
    "unet": lambda: (UNet(), lambda n: (torch.randn(n, 1, 8, 8),)),
    "unet_image_mask": lambda: (
        UNetLoss(),
        lambda n: (torch.randn(n, 1, 8, 8 + 8 * (n > 4)), torch.randint(0, 2, (n, 8, 8 + 8 * (n > 4)))),
    ),
    "super_resolution": lambda: (
        SuperResolution(),
        lambda n: (torch.randn(n, 1, 6, n + 4), torch.randn(n, 1, 12, 2 * (n + 4))),
    ),
    "spatial_transformer": lambda: (SpatialTransformer(), lambda n: (torch.randn(n, 1, 8, 8),)),
    "optical_flow": lambda: (Flow(), lambda n: (torch.randn(n, 1, 8, 8), torch.randn(n, 1, 8, 8))),
    "capsules": lambda: (Capsules(), lambda n: (torch.randn(n, 1, 8, 8),)),
    "deformable_attention": lambda: (Deformable(), lambda n: (torch.randn(n, 3, 16, 16),)),
    "roi_align_head": lambda: (RegionHead(), lambda n: (torch.randn(2, 3, 16, 16), _boxes(n))),
    "retina_loss": lambda: (
        Retina(),
        lambda n: (
            torch.randn(n, 3, 16, 16),
            torch.randint(0, 2, (n, 16, 3)).float(),
            torch.cat([-torch.rand(n, 16, 2), torch.rand(n, 16, 2)], -1),
        ),
    ),
    "yolo_head": lambda: (Yolo(), lambda n: (torch.randn(n, 3, 16, 16),)),
    "swin_windows": lambda: (Window(), lambda n: (torch.randn(n, 3, 16, 16),)),
    "mixer_stochastic_depth": lambda: (Mixer(), lambda n: (torch.randn(n, 3, 16, 16),)),
    "perceiver": lambda: (Perceiver(), lambda n: (torch.randn(n, 9, 3),)),
    "detr": lambda: (DetrLoss(), lambda n: (torch.randn(n, 3, 16, 16),)),
    "mobile_cumulative_norm": lambda: (Squeeze(), lambda n: (torch.randn(n, 3, 8, 8),)),
    "style_modulation": lambda: (StyleModulation(), lambda n: (torch.randn(n, 3, 6, 6), torch.randn(n, 5))),
    "involution": lambda: (Involution(), lambda n: (torch.randn(n, 4, 6, 6),)),
    "blur_pool": lambda: (BlurPool(), lambda n: (torch.randn(n, 3, 9, 9),)),
    "video_2plus1d": lambda: (Video(), lambda n: (torch.randn(n, 1, 4, 6, 6),)),
    "conv_mixer": lambda: (ConvMixer(rate=0.0), lambda n: (torch.randn(n, 3, 8, 8),)),
}
