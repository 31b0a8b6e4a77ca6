"""Every task of the table: a folder answers what transformers would, and trains with the model's own loss."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnxruntime
import pytest
import scipy.optimize
import torch
import transformers
from PIL import Image

from export.huggingface_types import tiny_of
from export.tiny_transformers import tiny_pair, tiny_tokenizer
from onward.data import preprocess
from onward.errors import ExportError, ModelError
from onward.export import artifacts_from_transformers, assign_detections, from_transformers
from onward.export.huggingface.assign import cheapest_pairs
from onward.export.huggingface.cards import processor_settings
from onward.export.huggingface.task_losses import LOSSES
from onward.export.huggingface.tasks import TASKS, TYPES, detect, task_for
from onward.pipeline.load import load
from onward.tasks import ANSWERS, answer_function

PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 56, 3)).astype(np.uint8))
WAVE = np.random.default_rng(0).normal(size=5000).astype(np.float32)
TEXT = "the ferry leaves at noon"


def answering(folder: Path, kind: str, task: str, companion: Any = None) -> tuple[Any, Any, Any]:
    """A pipeline of Onward's beside the model and the tokenizer or processor that it came from."""
    model, tokenizer = tiny_of(kind, task)
    companion = tokenizer if companion is None else companion
    from_transformers((model, companion), task, folder / "exported", opset=17)
    return load(folder / "exported"), model, companion


def test_the_table_names_only_what_there_is() -> None:
    rows = [*TASKS.values(), *(task_for(task, kind) for kind, task in TYPES)]
    assert {row.answer for row in rows} <= set(ANSWERS)
    assert all(callable(answer_function(word)) for word in ANSWERS)
    assert {row.loss for row in rows} - {None} <= set(LOSSES)
    assert all(hasattr(transformers, loader) for row in rows for loader in row.loaders)


@pytest.mark.parametrize(
    ("architecture", "kind", "task"),
    [
        ("Wav2Vec2ForCTC", "wav2vec2", "automatic-speech-recognition"),
        ("WhisperForConditionalGeneration", "whisper", "automatic-speech-recognition"),
        ("T5ForConditionalGeneration", "t5", "text2text"),
        ("T5WithLMHeadModel", "t5", "text2text"),
        ("MarianMTModel", "marian", "text2text"),
        ("DetrForObjectDetection", "detr", "object-detection"),
        ("OwlViTForObjectDetection", "owlvit", "zero-shot-object-detection"),
        ("SegformerForSemanticSegmentation", "segformer", "semantic-segmentation"),
        ("BertForMultipleChoice", "bert", "multiple-choice"),
        ("WavLMForXVector", "wavlm", "audio-xvector"),
        ("PatchTSTForPrediction", "patchtst", "time-series-forecasting"),
        ("VisionEncoderDecoderModel", "vision-encoder-decoder", "image-to-text"),
    ],
)
def test_auto_knows_the_task(architecture: str, kind: str, task: str) -> None:
    config = transformers.PretrainedConfig(architectures=[architecture])
    config.model_type = kind
    assert detect(config) == task


def shaded(height: int, width: int, mode: str = "RGB") -> Image.Image:
    """A picture in patches of one colour, which two ways of resizing leave alike."""
    colours = np.random.default_rng(height).integers(0, 256, (height // 8 + 1, width // 8 + 1, 3))
    whole = np.kron(colours, np.ones((8, 8, 1)))[:height, :width].astype(np.uint8)
    return Image.fromarray(whole).convert(mode)


@pytest.mark.parametrize(
    ("kind", "processor"),
    [
        ("detr", transformers.DetrImageProcessorPil(size={"shortest_edge": 48, "longest_edge": 64})),
        ("yolos", transformers.YolosImageProcessorPil(size={"shortest_edge": 48, "longest_edge": 80})),
        ("rt_detr", transformers.RTDetrImageProcessorPil(size={"height": 64, "width": 64})),
        (
            "dab-detr",
            transformers.ConditionalDetrImageProcessorPil(size={"shortest_edge": 48, "longest_edge": 64}),
        ),
        (
            "deformable_detr",
            transformers.DeformableDetrImageProcessorPil(size={"shortest_edge": 48, "longest_edge": 64}),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_objects_are_those_of_transformers(tmp_path: Path, kind: str, processor: Any) -> None:
    ours, model, _ = answering(tmp_path, kind, "object-detection", processor)
    theirs = transformers.pipeline("object-detection", model=model, image_processor=processor)
    for picture in (shaded(40, 56), shaded(97, 61), shaded(33, 70, "L"), shaded(64, 64, "RGBA")):
        expected = theirs(picture, threshold=0.1)
        got = ours(picture, threshold=0.1)
        assert [e["label"] for e in got] == [e["label"] for e in expected] != []
        assert [e["score"] for e in got] == pytest.approx([e["score"] for e in expected], abs=1e-3)
        for mine, other in zip(got, expected):
            # an edge on a whole number may fall to either side
            assert all(abs(mine["box"][edge] - other["box"][edge]) <= 1 for edge in other["box"])
    assert ours([PICTURE], threshold=0.999) == [[]]


def test_masks_are_those_of_transformers(tmp_path: Path) -> None:
    processor = transformers.SegformerImageProcessorPil(size={"height": 32, "width": 32})
    ours, model, _ = answering(tmp_path, "segformer", "semantic-segmentation", processor)
    expected = transformers.pipeline("image-segmentation", model=model, image_processor=processor)(PICTURE)
    got = ours(PICTURE)
    assert [entry["label"] for entry in got] == [entry["label"] for entry in expected]
    for mine, other in zip(got, expected):
        assert np.mean(mine["mask"] != np.asarray(other["mask"])) < 0.002  # ties at the edges of a region


def test_instances_are_those_of_transformers(tmp_path: Path) -> None:
    processor = transformers.MaskFormerImageProcessorPil(size={"height": 64, "width": 64})
    model, _ = tiny_of("maskformer", "instance-segmentation")
    with torch.no_grad():
        model.class_predictor.bias[-1] -= 5.0  # else no query finds anything
    from_transformers((model, processor), "instance-segmentation", tmp_path / "exported", opset=17)
    ours = load(tmp_path / "exported")
    theirs = transformers.pipeline("image-segmentation", model=model, image_processor=processor)
    picture = shaded(70, 50)
    for options in (
        {"subtask": "semantic"},
        {"subtask": "panoptic", "threshold": 0.1, "mask_threshold": 0.1, "overlap_mask_area_threshold": 0.01},
    ):
        expected, got = theirs(picture, **options), ours(picture, **options)
        assert [e["label"] for e in got] == [e["label"] for e in expected] != []
        for mine, other in zip(got, expected):
            assert mine["score"] == pytest.approx(other["score"], abs=1e-4)
            assert np.mean(mine["mask"] != np.asarray(other["mask"])) < 0.002
    with pytest.raises(ValueError, match="choose one of instance"):
        ours(picture, subtask="other")
    expected = theirs(PICTURE, threshold=0.1, subtask="instance")
    got = ours(PICTURE, threshold=0.1)
    # transformers keeps the candidates in no order of their own, so where masks overlap the last may be another
    assert sorted(e["score"] for e in got) == pytest.approx(sorted(e["score"] for e in expected), abs=1e-5)
    assert sorted(e["label"] for e in got) == sorted(e["label"] for e in expected)
    assert np.array_equal(
        np.any([e["mask"] for e in got], axis=0), np.any([np.asarray(e["mask"]) for e in expected], axis=0)
    )


@pytest.mark.parametrize("kind", ["dpt", "glpn", "depth_anything"])
def test_depth_is_that_of_transformers(tmp_path: Path, kind: str) -> None:
    if kind == "dpt":
        processor: Any = transformers.DPTImageProcessorPil(size={"height": 32, "width": 32})
    elif kind == "depth_anything":  # pictures keep their form, as those of the published models do
        settings = {"keep_aspect_ratio": True, "ensure_multiple_of": 4}
        processor = transformers.DPTImageProcessorPil(size={"height": 32, "width": 32}, **settings)
    else:
        processor = transformers.GLPNImageProcessorPil()
    ours, model, _ = answering(tmp_path, kind, "depth-estimation", processor)
    theirs = transformers.pipeline("depth-estimation", model=model, image_processor=processor)
    for picture in (PICTURE, shaded(97, 61)):
        reference = theirs(picture)["predicted_depth"].numpy()
        got = ours(picture)
        np.testing.assert_allclose(got["predicted_depth"], reference, atol=1e-3 * np.abs(reference).max())
        assert got["depth"].shape == reference.shape and got["depth"].dtype == np.uint8


def test_speech_is_spelled_as_transformers_spells_it(tmp_path: Path) -> None:
    letters = ["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefghijklmnopqrstuvwxyz"]
    (tmp_path / "vocab.json").write_text(json.dumps({letter: index for index, letter in enumerate(letters)}))
    tokenizer = transformers.Wav2Vec2CTCTokenizer(str(tmp_path / "vocab.json"))
    extractor = transformers.Wav2Vec2FeatureExtractor(do_normalize=True)
    processor = transformers.Wav2Vec2Processor(feature_extractor=extractor, tokenizer=tokenizer)
    model, _ = tiny_of("wav2vec2", "automatic-speech-recognition", vocab_size=len(letters))
    from_transformers((model, processor), "automatic-speech-recognition", tmp_path / "exported")
    theirs = transformers.pipeline(
        "automatic-speech-recognition", model=model, tokenizer=tokenizer, feature_extractor=extractor
    )
    for seed in range(5):
        wave = np.random.default_rng(seed).normal(size=4000 + 500 * seed).astype(np.float32)
        assert load(tmp_path / "exported")(wave) == theirs(wave.copy())


def greedy(model: Any, start: int, limit: int, **inputs: Any) -> list[int]:
    """Greedy decoding by torch's own model, without a cache."""
    ids = torch.tensor([[start]])
    with torch.no_grad():
        for _ in range(limit):
            best = int(model(**inputs, decoder_input_ids=ids, use_cache=False).logits[0, -1].argmax())
            if best == model.config.eos_token_id:
                break
            ids = torch.cat([ids, torch.tensor([[best]])], dim=1)
    return ids[0, 1:].tolist()


@pytest.mark.parametrize("kind", ["whisper", "speech_to_text"])
def test_speech_to_text_writes_with_a_cache_what_torch_writes_without(tmp_path: Path, kind: str) -> None:
    ours, model, tokenizer = answering(tmp_path, kind, "automatic-speech-recognition")
    features = (
        np.random.default_rng(0).normal(size=(8, 100) if kind == "whisper" else (60, 8)).astype(np.float32)
    )
    expected = greedy(model, 0, 8, input_features=torch.tensor(features[None]))
    assert {path.name for path in (tmp_path / "exported").glob("*.onnx")} == {
        "encoder_model.onnx",
        "decoder_model.onnx",
    }
    assert ours(features, max_new_tokens=8) == {"text": tokenizer.decode(expected, skip_special_tokens=True)}


def test_a_picture_is_described(tmp_path: Path) -> None:
    ours, model, tokenizer = answering(tmp_path, "vision-encoder-decoder", "image-to-text")
    pixels = np.random.default_rng(0).normal(size=(3, 16, 16)).astype(np.float32)
    expected = model.generate(torch.tensor(pixels[None]), max_new_tokens=8, do_sample=False)[0, 1:]
    assert ours(pixels, max_new_tokens=8) == tokenizer.decode(expected, skip_special_tokens=True)


def test_a_choice_is_scored_by_the_model(tmp_path: Path) -> None:
    ours, model, tokenizer = answering(tmp_path, "bert", "multiple-choice")
    choices = ["at noon", "at the small bridge", "why"]
    encoded = tokenizer([[TEXT, choice] for choice in choices], padding=True, return_tensors="pt")
    with torch.no_grad():
        scores = model(**{name: value[None] for name, value in encoded.items()}).logits[0].softmax(-1)
    got = ours(TEXT, choices)
    assert {e["choice"]: e["score"] for e in got} == pytest.approx(
        dict(zip(choices, scores.tolist())), abs=1e-5
    )
    assert got[0]["score"] == max(e["score"] for e in got)
    with pytest.raises(TypeError, match="a text and choices"):
        ours(TEXT)


def test_similar_sentences_have_high_scores(tmp_path: Path) -> None:
    ours, _, _ = answering(tmp_path, "bert", "sentence-similarity")
    scores = ours(TEXT, [TEXT, "why", "nobody expected a small library"])
    assert scores[0] == pytest.approx(1.0, abs=1e-6) and max(scores[1:]) < 1.0
    with pytest.raises(TypeError, match="a sentence and others"):
        ours(TEXT)


def test_sound_frame_by_frame_and_as_a_speaker(tmp_path: Path) -> None:
    frames, model, _ = answering(tmp_path / "frames", "wav2vec2", "audio-frame-classification")
    with torch.no_grad():
        expected = model(torch.tensor(WAVE[None])).logits[0].sigmoid()
    got = frames(WAVE)
    np.testing.assert_allclose([list(frame.values()) for frame in got], expected, atol=1e-5)
    assert list(got[0]) == ["LABEL_0", "LABEL_1"]
    speaker, model, _ = answering(tmp_path / "speaker", "wavlm", "audio-xvector")
    with torch.no_grad():
        vector = torch.nn.functional.normalize(model(torch.tensor(WAVE[None])).embeddings, dim=-1)[0]
    np.testing.assert_allclose(speaker(WAVE), vector, atol=1e-5)


def test_text_becomes_sound(tmp_path: Path) -> None:
    ours, model, tokenizer = answering(tmp_path, "vits", "text-to-audio")
    model.noise_scale = model.noise_scale_duration = 0.0
    with torch.no_grad():
        expected = model(**tokenizer(TEXT, return_tensors="pt", return_token_type_ids=False)).waveform[0]
    got = ours(TEXT)
    assert got["sampling_rate"] == model.config.sampling_rate
    np.testing.assert_allclose(got["audio"], expected, atol=1e-4)


@pytest.mark.parametrize("kind", ["patchtst", "patchtsmixer"])
def test_a_series_is_continued(tmp_path: Path, kind: str) -> None:
    ours, model, _ = answering(tmp_path, kind, "time-series-forecasting")
    past = np.random.default_rng(0).normal(size=(32, 2)).astype(np.float32)
    with torch.no_grad():
        expected = model(past_values=torch.tensor(past[None])).prediction_outputs[0]
    np.testing.assert_allclose(ours(past), expected, atol=1e-5)
    assert ours(np.stack([past, past])).shape == (2, 4, 2)
    with pytest.raises(ValueError, match="time, channels"):
        ours(past[0])


def test_texts_are_looked_for_in_a_picture(tmp_path: Path) -> None:
    processor = transformers.OwlViTImageProcessorPil(size={"height": 32, "width": 32})
    model, tokenizer = tiny_of("owlvit", "zero-shot-object-detection")
    both = transformers.OwlViTProcessor(image_processor=processor, tokenizer=tokenizer)
    from_transformers((model, both), "zero-shot-object-detection", tmp_path / "exported", opset=17)
    labels = ["the ferry", "a small library at the bridge"]
    got = load(tmp_path / "exported")(PICTURE, labels, threshold=0.0)
    theirs = transformers.pipeline(
        "zero-shot-object-detection", model=model, image_processor=processor, tokenizer=tokenizer
    )
    # a text alone in its batch has no padding there, and random weights see it
    expected = theirs(PICTURE, candidate_labels=labels, threshold=0.0)
    assert len(got) == len(expected) == len(labels) * 16
    best = {label: [e for e in expected if e["label"] == label] for label in labels}
    alone = load(tmp_path / "exported")
    for label in labels:
        mine = alone(PICTURE, [label], threshold=0.0)
        assert [e["score"] for e in mine] == pytest.approx([e["score"] for e in best[label]], abs=1e-5)
        assert [e["box"] for e in mine] == [e["box"] for e in best[label]]
    assert alone(PICTURE, labels, threshold=0.0, top_k=3) == got[:3]
    with pytest.raises(TypeError, match="needs labels"):
        load(tmp_path / "exported")(PICTURE)


def test_pictures_out_of_pictures(tmp_path: Path) -> None:
    processor = transformers.Swin2SRImageProcessorPil()
    ours, model, _ = answering(tmp_path / "larger", "swin2sr", "image-to-image", processor)
    with torch.no_grad():
        expected = model(**processor(PICTURE, return_tensors="pt")).reconstruction[0].clamp(0, 1)
    got = ours(PICTURE)
    assert got.dtype == np.uint8 and got.shape == (96, 128, 3)
    np.testing.assert_allclose(got, expected.permute(1, 2, 0) * 255, atol=0.51)
    filled, model, _ = answering(tmp_path / "filled", "vit", "masked-image-modeling")
    pixels = np.random.default_rng(0).normal(size=(3, 16, 16)).astype(np.float32)
    mask = np.arange(16) % 2 == 0
    with torch.no_grad():
        rebuilt = model(torch.tensor(pixels[None]), bool_masked_pos=torch.tensor(mask[None])).reconstruction
    np.testing.assert_allclose(filled(pixels, mask), rebuilt[0], atol=1e-5)


def test_joints_are_where_the_heat_is(tmp_path: Path) -> None:
    ours, model, _ = answering(tmp_path, "vitpose", "keypoint-detection")
    pixels = np.random.default_rng(0).normal(size=(3, 64, 48)).astype(np.float32)
    with torch.no_grad():
        heat = model(torch.tensor(pixels[None])).heatmaps[0]
    best = [divmod(int(plane.argmax()), plane.shape[1]) for plane in heat]
    got = ours(pixels)
    assert [(e["y"], e["x"]) for e in got] == [
        pytest.approx(((row + 0.5) * 64 / heat.shape[1], (column + 0.5) * 48 / heat.shape[2]))
        for row, column in best
    ]


@pytest.mark.parametrize(
    "name",
    [
        "WhisperFeatureExtractor",
        "ASTFeatureExtractor",
        "Speech2TextFeatureExtractor",
        "SeamlessM4TFeatureExtractor",
    ],
)
def test_a_wave_becomes_the_spectrum_that_transformers_makes(name: str) -> None:
    extractor = getattr(transformers, name)()
    expected = next(iter(extractor(WAVE, sampling_rate=16000, return_tensors="np").values()))[0]
    got = preprocess.sound(WAVE, {**extractor.to_dict(), "feature_extractor_type": name})
    np.testing.assert_allclose(got, expected, atol=1e-4)


PROCESSORS = [
    transformers.ViTImageProcessorPil(size={"height": 16, "width": 16}),
    transformers.ConvNextImageProcessorPil(size={"shortest_edge": 32}),
    transformers.ConvNextImageProcessorPil(size={"shortest_edge": 384}),
    transformers.PoolFormerImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    ),
    transformers.LevitImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}),
    transformers.EfficientNetImageProcessorPil(size={"height": 32, "width": 32}, rescale_offset=True),
    transformers.EfficientNetImageProcessorPil(size={"height": 32, "width": 32}, include_top=False),
    transformers.MobileViTImageProcessorPil(
        size={"shortest_edge": 36}, crop_size={"height": 32, "width": 32}
    ),
    transformers.DetrImageProcessorPil(size={"shortest_edge": 48, "longest_edge": 64}),
    transformers.YolosImageProcessorPil(size={"shortest_edge": 48, "longest_edge": 64}),
    transformers.MaskFormerImageProcessorPil(size={"shortest_edge": 48, "longest_edge": 64}),
    transformers.DPTImageProcessorPil(size={"height": 32, "width": 32}, keep_aspect_ratio=True),
]


@pytest.mark.parametrize("processor", PROCESSORS, ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("shape", [(40, 56), (97, 61), (30, 20)], ids=str)
def test_pictures_are_prepared_as_by_their_processor(processor: Any, shape: tuple[int, int]) -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*shape, 3)).astype(np.uint8))
    expected = np.asarray(processor(picture, return_tensors="np")["pixel_values"][0])
    settings = processor_settings(processor)
    assert "unknown" not in settings
    for given in (picture, np.asarray(picture)):
        got = preprocess.image(given, settings)
        assert got.shape == expected.shape
        np.testing.assert_allclose(got, expected, atol=0.06)


def test_a_processor_that_does_something_else_is_named(tmp_path: Path) -> None:
    processor = transformers.PerceiverImageProcessorPil(
        size={"height": 16, "width": 16}, crop_size={"height": 20, "width": 20}
    )
    model, _ = tiny_of("vit", "image-classification")
    with pytest.warns(UserWarning, match="prepares pictures in a way that"):
        from_transformers((model, processor), "image-classification", tmp_path / "exported")
    ours = load(tmp_path / "exported")
    with pytest.raises(ModelError, match="give float32 arrays"):
        ours(PICTURE)
    assert "score" in ours(np.zeros((3, 16, 16), np.float32))


def test_pictures_of_any_mode_and_files_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    processor = transformers.ViTImageProcessorPil(size={"height": 16, "width": 16})
    ours, model, _ = answering(tmp_path, "vit", "image-classification", processor)
    theirs = transformers.pipeline("image-classification", model=model, image_processor=processor)
    alpha = Image.fromarray(np.random.default_rng(1).integers(0, 256, (40, 56, 4)).astype(np.uint8), "RGBA")
    PICTURE.save(tmp_path / "picture.png")
    for given in (*(PICTURE.convert(mode) for mode in ("L", "P", "1", "CMYK")), alpha, alpha.convert("LA"),
                  str(tmp_path / "picture.png")):  # fmt: skip
        expected = {e["label"]: e["score"] for e in theirs(given, top_k=9)}
        assert {e["label"]: e["score"] for e in ours(given, top_k=None)} == pytest.approx(expected, abs=1e-4)


def test_boxes_of_a_detector_without_a_class_for_nothing_may_have_several_labels(tmp_path: Path) -> None:
    processor = transformers.ConditionalDetrImageProcessorPil(size={"shortest_edge": 48, "longest_edge": 64})
    ours, model, _ = answering(tmp_path, "conditional_detr", "object-detection", processor)
    theirs = transformers.pipeline("object-detection", model=model, image_processor=processor)
    for picture in (PICTURE, PICTURE.resize((61, 97))):
        expected = sorted(theirs(picture, threshold=0.1), key=lambda e: -e["score"])
        got = ours(picture, threshold=0.1)
        assert [e["score"] for e in got] == pytest.approx([e["score"] for e in expected], abs=1e-4)
        assert [(e["label"], e["box"]) for e in got] == [(e["label"], e["box"]) for e in expected]


def test_sound_comes_as_an_array_a_file_or_with_its_rate(tmp_path: Path) -> None:
    extractor = transformers.Wav2Vec2FeatureExtractor(do_normalize=True)
    ours, model, _ = answering(tmp_path, "wav2vec2", "audio-classification", extractor)
    theirs = transformers.pipeline("audio-classification", model=model, feature_extractor=extractor)
    bits = (WAVE.clip(-4, 4) / 4 * 32767).astype("<i2")
    with wave.open(str(tmp_path / "sound.wav"), "wb") as file:
        file.setparams((1, 2, 16000, len(bits), "NONE", ""))
        file.writeframes(bits.tobytes())
    samples = bits.astype(np.float32) / 2**15
    expected = {e["label"]: e["score"] for e in theirs(samples.copy(), top_k=9)}
    for given in (samples, str(tmp_path / "sound.wav"), {"raw": samples, "sampling_rate": 16000},
                  {"array": np.stack([samples, samples]), "sampling_rate": 16000}):  # fmt: skip
        assert {e["label"]: e["score"] for e in ours(given, top_k=None)} == pytest.approx(expected, abs=1e-4)
    tone = [
        np.sin(2 * np.pi * 440 * np.arange(rate // 4) / rate).astype(np.float32) for rate in (8000, 16000)
    ]
    slow, fast = ours({"array": tone[0], "sampling_rate": 8000}), ours(tone[1])
    assert slow["label"] == fast["label"] and slow["score"] == pytest.approx(fast["score"], abs=0.02)
    with pytest.raises(ValueError, match="a sound is an array"):
        ours({"array": tone[0]})


def test_labels_of_siglip_are_scored_one_by_one(tmp_path: Path) -> None:
    model, tokenizer = tiny_of("siglip", "zero-shot-image-classification")
    tokenizer.model_max_length = 64
    processor = transformers.SiglipImageProcessorPil(size={"height": 16, "width": 16})
    both = transformers.SiglipProcessor(image_processor=processor, tokenizer=tokenizer)
    from_transformers((model, both), "zero-shot-image-classification", tmp_path / "exported", opset=17)
    theirs = transformers.pipeline(
        "zero-shot-image-classification", model=model, image_processor=processor, tokenizer=tokenizer
    )
    labels = ["ferry", "small library", "river"]
    expected = theirs(PICTURE, candidate_labels=labels)
    got = load(tmp_path / "exported")(PICTURE, labels)
    assert [e["label"] for e in got] == [e["label"] for e in expected]
    assert [e["score"] for e in got] == pytest.approx([e["score"] for e in expected], abs=1e-4)


@pytest.mark.parametrize("resample", [1, 2, 3])
def test_a_picture_is_resized_as_pillow_does_to_the_last_level(resample: int) -> None:
    settings = {
        "size": {"height": 17, "width": 61},
        "resample": resample,
        "do_rescale": False,
        "do_normalize": False,
    }
    expected = np.asarray(PICTURE.resize((61, 17), resample))
    np.testing.assert_array_equal(preprocess.image(PICTURE, settings).transpose(1, 2, 0), expected)


def test_a_sentence_transformer_object_is_exported_with_its_modules(tmp_path: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    from sentence_transformers import models

    inner, tokenizer = tiny_pair("bert", "pooling")
    inner.save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    transformer = models.Transformer(str(tmp_path / "bert"))
    dense = models.Dense(16, 5)
    model = sentence_transformers.SentenceTransformer(
        modules=[transformer, models.Pooling(16, pooling_mode="cls"), dense, models.Normalize()], device="cpu"
    )
    from_transformers(model, "auto", tmp_path / "exported")
    texts = [TEXT, "nobody expected a small library to train"]
    np.testing.assert_allclose(load(tmp_path / "exported")(texts), model.encode(texts), atol=1e-5)


class Timm(torch.nn.Module):
    """What a timm model is to an exporter: logits from pixels, and a record of how pixels are made."""

    num_classes = 3
    pretrained_cfg: ClassVar[dict[str, Any]] = {
        "architecture": "tiny",
        "input_size": (3, 16, 16),
        "interpolation": "bicubic",
        "crop_pct": 0.9,
        "mean": (0.5, 0.5, 0.5),
        "std": (0.25, 0.25, 0.25),
    }

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 4, 3)
        self.head = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.stem(x)).mean((2, 3)))


def test_a_model_that_looks_like_timms_is_an_image_classifier(tmp_path: Path) -> None:
    model = Timm().eval()
    from_transformers(model, "auto", tmp_path / "exported")
    pipeline = load(tmp_path / "exported")
    size = (round(17 * 56 / 40 - 0.5), 17)
    resized = np.asarray(PICTURE.resize(size, 3))[0:16, (size[0] - 16) // 2 :][:, :16]
    pixels = torch.tensor((resized / 255 - 0.5) / 0.25, dtype=torch.float32).permute(2, 0, 1)[None]
    with torch.no_grad():
        scores = model(pixels)[0].softmax(-1)
    assert {e["label"]: e["score"] for e in pipeline(PICTURE, top_k=None)} == pytest.approx(
        {f"LABEL_{i}": float(score) for i, score in enumerate(scores)}, abs=1e-5
    )
    folder = artifacts_from_transformers(model, "image-classification", tmp_path / "artifacts")
    session = onnxruntime.InferenceSession(folder / "training_model.onnx", providers=["CPUExecutionProvider"])
    assert {"stem.weight", "head.bias"} <= {value.name for value in session.get_inputs()}
    with pytest.raises(ExportError, match="'image-classification', not for 'fill-mask'"):
        from_transformers(model, "fill-mask")


# ---- training --------------------------------------------------------------------------------------------------


def first_step(folder: Path, model: Any, inputs: dict[str, Any]) -> tuple[float, dict[str, np.ndarray]]:
    """The loss and the gradients of the training model for a model's own parameters."""
    session = onnxruntime.InferenceSession(folder / "training_model.onnx", providers=["CPUExecutionProvider"])
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    feed: dict[str, np.ndarray] = {"lazy_reset_grad": np.array([True])}
    for value in session.get_inputs():
        name = value.name.removesuffix("_grad.accumulation.buffer")
        if name in tensors:
            feed[value.name] = tensors[name].detach().numpy()
        elif name in inputs:
            feed[name] = np.asarray(inputs[name])
        elif name == "random_seed":
            feed[name] = np.zeros(value.shape, np.int64)
    names = [output.name for output in session.get_outputs()]
    got = dict(zip(names, session.run(names, feed)))
    suffix = "_grad.accumulation.out"
    return float(got["loss"]), {n.removesuffix(suffix): v for n, v in got.items() if n.endswith(suffix)}


def still(config: Any) -> dict[str, float]:
    """No dropout, under whatever name, so that two runs are the same."""
    return {name: 0.0 for name in vars(config) if "drop" in name and isinstance(getattr(config, name), float)}


def waves(model: Any) -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(2, 3000, generator=torch.Generator().manual_seed(0))}


def speech(model: Any) -> dict[str, torch.Tensor]:
    return {**waves(model), "labels": torch.tensor([[7, 8, 8, 9], [10, 11, -100, -100]])}


def framed(model: Any) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        count = model(**waves(model)).logits.shape[1]
    return {**waves(model), "labels": torch.arange(2 * count).reshape(2, count) % 2}


def speakers(model: Any) -> dict[str, torch.Tensor]:
    return {**waves(model), "labels": torch.tensor([1, 0])}


def pixels(size: int) -> torch.Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))


def segmented(model: Any) -> dict[str, torch.Tensor]:
    labels = (torch.arange(2 * 32 * 32) % 2).reshape(2, 32, 32)
    labels[:, :4] = 255
    return {"pixel_values": pixels(32), "labels": labels}


def hidden_patches(model: Any) -> dict[str, torch.Tensor]:
    return {"pixel_values": pixels(16), "bool_masked_pos": torch.arange(32).reshape(2, 16) % 3 == 0}


def deep(model: Any) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        shape = model(pixels(32)).predicted_depth.shape
    return {
        "pixel_values": pixels(32),
        "labels": torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.5,
    }


def chosen(model: Any) -> dict[str, torch.Tensor]:
    encoded = tiny_tokenizer()([[TEXT, "why"], [TEXT, "at noon"]] * 2, padding=True, return_tensors="pt")
    batch = {name: value.reshape(2, 2, -1) for name, value in encoded.items()}
    return {**batch, "labels": torch.tensor([1, 0])}


def future(model: Any) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return {
        "past_values": torch.randn(2, 32, 2, generator=random),
        "future_values": torch.randn(2, 4, 2, generator=random),
    }


def heard(model: Any) -> dict[str, torch.Tensor]:
    labels = torch.tensor([[7, 8, 9], [10, 11, -100]])
    return {
        "input_features": torch.randn(2, 8, 100, generator=torch.Generator().manual_seed(0)),
        "decoder_input_ids": torch.tensor([[0, 7, 8], [0, 10, 11]]),
        "labels": labels,
    }


LOSS_CASES = [
    ("wav2vec2", "automatic-speech-recognition", speech),
    ("whisper", "automatic-speech-recognition", heard),
    ("wav2vec2", "audio-frame-classification", framed),
    ("wav2vec2", "audio-xvector", speakers),
    ("segformer", "semantic-segmentation", segmented),
    ("vit", "masked-image-modeling", hidden_patches),
    ("glpn", "depth-estimation", deep),
    ("bert", "multiple-choice", chosen),
    ("patchtst", "time-series-forecasting", future),
]


@pytest.mark.parametrize(("kind", "task", "batch"), LOSS_CASES, ids=[f"{c[0]}-{c[1]}" for c in LOSS_CASES])
def test_the_loss_and_its_gradients_are_the_models_own(
    tmp_path: Path, kind: str, task: str, batch: Any
) -> None:
    settings = {**still(tiny_of(kind, task)[0].config), "drop_path_rate": 0.0, "ctc_loss_reduction": "mean"}
    model, companion = tiny_of(kind, task, **settings)
    inputs = batch(model)
    folder = artifacts_from_transformers((model, companion), task, tmp_path / "artifacts")
    model.train()
    own = dict(inputs)
    if task == "audio-frame-classification":  # transformers takes one-hot labels here
        own["labels"] = torch.nn.functional.one_hot(inputs["labels"], 2)
    expected = model(**own).loss
    model.zero_grad()
    expected.backward()
    loss, gradients = first_step(folder, model, inputs)
    assert loss == pytest.approx(expected.item(), rel=1e-4)
    reference = {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}
    largest = max(float(np.abs(value).max()) for value in reference.values())
    checked = set(gradients) & set(reference)
    assert len(checked) >= 0.9 * len(reference)
    # torch keeps the padding row of an embedding as it is; a lookup in ONNX has no such exception (documented).
    for name, module in model.named_modules():
        if getattr(module, "padding_idx", None) is not None and f"{name}.weight" in gradients:
            gradients[f"{name}.weight"][module.padding_idx] = reference[f"{name}.weight"][module.padding_idx]
    for name in checked:
        scale = float(np.abs(reference[name]).max())
        np.testing.assert_allclose(
            gradients[name], reference[name], atol=1e-3 * scale + 1e-5 * largest, err_msg=name
        )


@pytest.mark.parametrize("kind", ["detr", "yolos", "conditional_detr"])
def test_a_detector_trains_on_boxes_that_were_assigned_on_the_host(tmp_path: Path, kind: str) -> None:
    settings = still(tiny_of(kind, "object-detection")[0].config)
    model, companion = tiny_of(kind, "object-detection", **settings)
    # One size only: the ResNet's running statistics stay those of evaluation in DETR's backbone.
    folder = artifacts_from_transformers((model, companion), "object-detection", tmp_path / "artifacts")
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    objects = [
        {"class_labels": [1, 2], "boxes": [[0.3, 0.3, 0.2, 0.2], [0.7, 0.6, 0.3, 0.2]]},
        {"class_labels": [3], "boxes": [[0.5, 0.5, 0.4, 0.4]]},
    ]
    labels = [{name: torch.tensor(value) for name, value in entry.items()} for entry in objects]
    model.train()
    outputs = model(images, labels=labels)
    cost = {"class_cost": float(model.config.class_cost)} | {
        "box_cost": float(model.config.bbox_cost),
        "overlap_cost": float(model.config.giou_cost),
    }
    assigned = assign_detections(
        outputs.logits.detach().numpy(), outputs.pred_boxes.detach().numpy(), objects, classes=4, **cost
    )
    loss, gradients = first_step(folder, model, {"pixel_values": images, **assigned})
    assert loss == pytest.approx(float(outputs.loss.detach()), rel=2e-3)
    assert all(np.isfinite(value).all() for value in gradients.values())


def test_assignments_are_as_cheap_as_scipys() -> None:
    random = np.random.default_rng(0)
    for rows, columns in [(1, 1), (5, 5), (9, 4), (30, 17), (7, 0)]:
        cost = random.normal(size=(rows, columns))
        pairs = cheapest_pairs(cost)
        best = cost[scipy.optimize.linear_sum_assignment(cost)].sum()
        assert sum(cost[pair] for pair in pairs) == pytest.approx(best)
        assert sorted(column for _, column in pairs) == list(range(columns))
    with pytest.raises(ValueError, match="3 objects cannot be shared out among 2 boxes"):
        cheapest_pairs(np.zeros((2, 3)))


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        ({"class_labels": [9], "boxes": [[0.5, 0.5, 0.1, 0.1]]}, "class 9 is outside 0 to 3"),
        ({"class_labels": [1, 1], "boxes": [[0.5, 0.5, 0.1, 0.1]]}, "2 classes for 1 boxes"),
        (
            {"class_labels": [1] * 3, "boxes": [[0.5, 0.5, 0.1, 0.1]] * 3},
            "3 objects, and the model has 2 boxes",
        ),
    ],
)
def test_wrong_objects_are_named_by_their_picture(objects: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"picture 0: {message}"):
        assign_detections(np.zeros((1, 2, 5)), np.full((1, 2, 4), 0.5), [objects], classes=4)
