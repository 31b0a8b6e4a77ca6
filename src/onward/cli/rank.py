"""One process of `onward distributed`; torchrun starts it with the options as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

__all__ = ["main"]


def main(options: dict[str, Any]) -> None:
    """Train this rank's share; rank 0 writes checkpoints and the history."""
    from onward.cli.data import load_data, parse_pairs
    from onward.distributed import Parameters, ShardedArrays, TrainingRunner

    artifacts, directory = Path(options["artifacts"]), Path(options["directory"])
    specs = _user_inputs(artifacts / "training_model.onnx")
    mapping = parse_pairs(options["mapping"] or (), "--map")

    def loader(sources: list[str] | None, *, shuffle: bool) -> Any:
        if not sources:
            return None
        loaded = load_data(sources, specs, mapping=mapping, label=options["label"])
        if loaded.arrays is None:
            return loaded.value
        arrays = list(loaded.arrays.values())
        return ShardedArrays(*arrays, batch_size=options["batch_size"], shuffle=shuffle, seed=options["seed"])

    runner = TrainingRunner(
        Parameters(
            artifacts=artifacts,
            epochs=options["epochs"],
            learning_rate=options["learning_rate"],
            gradient_accumulation_steps=options["accumulation"],
            seed=options["seed"],
            pipeline_parallel_size=options["stages"],
            shard_optimizer=options["shard_optimizer"],
            checkpoint_directory=directory,
            checkpoint_every=options["save_every"],
        )
    )
    train, test = loader(options["data"], shuffle=True), loader(options["eval_data"], shuffle=False)
    with runner:
        history = runner.run(train, test)
        loss = runner.end_training(test)
        if runner.rank == 0:
            found = {"losses": history.losses, "skipped": history.skipped, "eval_loss": loss}
            (directory / "distributed.json").write_text(json.dumps(found), encoding="utf-8")


def _user_inputs(model: Path) -> list[Any]:
    import onnx

    from onward.cli.fitting import specs_of

    proto = onnx.load(str(model), load_external_data=False)
    about = {entry.key: entry.value for entry in proto.metadata_props}
    parameters = {
        *json.loads(about.get("onward.trainable", "[]")),
        *json.loads(about.get("onward.frozen", "[]")),
    }
    random = json.loads(about.get("onward.random", "null"))
    return [
        spec
        for spec in specs_of(proto.graph)
        if spec.name not in {*parameters, "lazy_reset_grad", random}
        and not spec.name.endswith("_grad.accumulation.buffer")
    ]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
