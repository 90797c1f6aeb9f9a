"""Models of diffusers, torch-geometric, timm and torchvision, if these packages are installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from autobatch import Workload
from benchmarks.clients.data import DRAW, IMAGES, LABELS, SAMPLES, adamw, classes_loss, workload

TIMES = torch.randint(0, 1000, (SAMPLES,), generator=DRAW)
NODES, EDGES, FEATURES = 12, 30, 16


def _denoise(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean squared error of the noise that a model predicts."""
    from diffusers import DDPMScheduler

    pictures, times = batch
    noise = torch.randn_like(pictures)
    noisy = DDPMScheduler().add_noise(pictures, noise, times)
    return mse_loss(model(noisy, times).sample, noise)


def _unet() -> Workload:
    from diffusers import UNet2DModel

    settings = {
        "sample_size": 32,
        "block_out_channels": (16, 32),
        "layers_per_block": 1,
        "norm_num_groups": 4,
    }
    blocks = {
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }
    build = partial(UNet2DModel, attention_head_dim=4, **settings, **blocks)
    return workload("diffusers UNet", build, [IMAGES, TIMES], _denoise)


def _graphs() -> Workload:
    from torch_geometric.data import Batch, Data
    from torch_geometric.nn import GCNConv, global_mean_pool

    class Gcn(nn.Module):
        """Two convolutions on a graph, and a classifier of its mean."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = GCNConv(FEATURES, 48), GCNConv(48, 48)
            self.head = nn.Linear(48, 10)

        def forward(self, graph: Any) -> Tensor:
            hidden = self.first(graph.x, graph.edge_index).relu()
            hidden = self.second(hidden, graph.edge_index).relu()
            return self.head(global_mean_pool(hidden, graph.batch, graph.num_graphs))

    graphs = [
        Data(
            x=torch.randn(NODES, FEATURES, generator=DRAW),
            edge_index=torch.randint(0, NODES, (2, EDGES), generator=DRAW),
            y=LABELS[number : number + 1],
        )
        for number in range(SAMPLES)
    ]

    def collate(samples: Sequence[Any]) -> Any:
        return Batch.from_data_list(list(samples))

    return Workload(
        name="torch-geometric GCN",
        model=Gcn,
        train_data=graphs,
        loss=lambda model, graph: cross_entropy(model(graph), graph.y),
        optimizer=adamw,
        learning_rate=1e-3,
        collate=collate,
    )


def load_torchvision() -> None:
    """Import torchvision, if it is installed, also with a build of torch that its wheel is not for.

    Its usual wheels are for builds with CUDA. With another one, their compiled operators are not loaded, and
    the import stops where it describes two of them. Classifiers call neither, so both are declared here.
    Other libraries import torchvision too, so this comes before them.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for operator in ("nms", "qnms"):
            signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{operator}", signature)
        importlib.import_module("torchvision")


def _timm(name: str, model: str, **settings: Any) -> Workload:
    timm = importlib.import_module("timm")
    build = partial(timm.create_model, model, num_classes=10, **settings)
    return workload(name, build, [IMAGES, LABELS], classes_loss)


def _torchvision(name: str, model: str) -> Workload:
    models = importlib.import_module("torchvision.models")
    return workload(name, partial(getattr(models, model), num_classes=10), [IMAGES, LABELS], classes_loss)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "diffusers UNet": _unet,
    "torch-geometric GCN": _graphs,
    "timm ConvNeXt with drop path": partial(
        _timm, "timm ConvNeXt with drop path", "convnext_atto", drop_path_rate=0.2
    ),
    "timm ViT": partial(_timm, "timm ViT", "vit_tiny_patch16_224", img_size=32, patch_size=8),
    "timm EfficientNet": partial(_timm, "timm EfficientNet", "efficientnet_b0"),
    "torchvision ResNet": partial(_torchvision, "torchvision ResNet", "resnet18"),
    "torchvision MobileNet": partial(_torchvision, "torchvision MobileNet", "mobilenet_v3_small"),
}
