"""What the files of Onward agree on: names of inputs and outputs, and keys of a model's metadata.

Whoever writes an artifact and whoever reads it take these names from here. Changing one breaks files that exist:
add a new one instead, and keep reading the old. `model_metadata` reads what stands under the keys.
"""

from __future__ import annotations

OPSET = 21  # in which graphs are built: older files are raised to it, and files for older runtimes lowered from it
EXPORT_OPSET = 18  # the default of exports from PyTorch and Hugging Face

# ---- inputs and outputs of a training model, as onnxruntime-training names them ----------------------------

BUFFER = "_grad.accumulation.buffer"  # after a parameter's name: its gradient so far, an input
OUT = "_grad.accumulation.out"  # after a parameter's name: its gradient after the step, an output
RESET = "lazy_reset_grad"  # the input that says whether to forget the gradients so far
NEXT = ".next"  # after a state tensor's name: its value after the step, an output
SEED = "random_seed"  # the input from which dropout and other randomness follow
LOSS_SCALE = "loss_scale"  # the parameter by which gradients of a float16 model come multiplied
FIRST_SCALE = 65536.0  # where that scale begins

# ---- inputs of an optimizer model ---------------------------------------------------------------------------

# of one element, whatever the others have
SCALARS = ("learning_rate", "step", "gradient_scale", "weight_decay")
# the state in the form over sequences, as onnxruntime-training names it
MOMENTS = ("first_order_moments", "second_order_moments", "third_order_moments")

# ---- the seed of a step: seed·SEED_FACTOR + step·STEP_FACTOR in 64 bits ---------------------------------------

# odd, so that neighbouring seeds and steps spread over all 64 bits (Weyl sequences of the golden ratio and its kin)
SEED_FACTOR, STEP_FACTOR = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03

# ---- metadata of every artifact -----------------------------------------------------------------------------

# training, eval, optimizer, inference, or a portable step's name: train_step, eval_step …
ROLE = "onward.role"
VERSION = "onward.version"  # the version of Onward that wrote it
ARTIFACTS = "onward.artifacts"  # the same in all models of one set
PRECISION = "onward.precision"  # fp32, fp16 or bf16

# ---- metadata of training and eval models ---------------------------------------------------------------

TRAINABLE = "onward.trainable"  # names of the parameters that train
FROZEN = "onward.frozen"  # names of those that do not
STATISTICS = "onward.statistics"  # names of the batch-norm statistics
LOSS = "onward.loss"  # the output that is the loss
LOSS_NAME = "onward.loss_name"  # what the loss is called, for reports
OUTPUTS = "onward.outputs"  # the forward model's own outputs
LABELS = "onward.labels"  # by input of class numbers: how many classes, and the number that is ignored
CLASSES = "onward.classes"  # the names of the classes, in the order of the outputs
TASK = "onward.task"  # the task, its problem type, and what the outputs mean
ORIGIN = "onward.origin"  # where the model came from: base, digests of the data, settings, versions
DEFAULTS = "onward.defaults"  # settings for training that fit this model
PREPROCESSING = "onward.preprocessing"  # how inputs are made from the user's data
RANDOM = "onward.random"  # the seed's input, or null
SCALE = "onward.loss_scale"  # the name of the loss scale's parameter
OPTIMIZER = "onward.optimizer"  # of an optimizer model: its rule, options and groups

# ---- metadata of forward and inference models -------------------------------------------------------------

REQUIRES_GRAD = "onward.requires_grad"  # parameters that the exported module trains
FROZEN_PARAMS = "onward.frozen_params"  # those that it does not
BUFFERS = "onward.buffers"  # buffers of the module that are in the file
EXPORT = "onward.export"  # how a model was exported
HEAD = "onward.head"  # what replacing the last layer did
LORA = "onward.lora"  # on a node: which adapter it belongs to
# on a node that computes a convolution's weight gradient: of what, and how
CONV_WEIGHT = "onward.conv_weight"
# how a model was rounded for training: scheme, calibration, tables, ranges
QUANTIZATION = "onward.quantization"
QUANTIZED = "onward.quantized"  # on a node of it: how its weight is rounded
TRAINED = "onward.trained"  # of an inference model: that its weights come from training

# ---- metadata of the portable step: see docs/portable-format.md --------------------------------------------

PORTABLE = "onward.portable"
BATCH_INPUTS = "onward.batch_inputs"
RESULTS = "onward.results"
IN_PLACE = "onward.in_place"  # of a portable step: whether a next state may lie where the state lies
STATE = "onward.state"
STATE_DIGEST = "onward.state_digest"
CARD = "onward.json"  # of an exported folder
PIPELINE = "pipeline"  # the folder beside artifacts with the tokenizer and the card of the model to be
WEIGHTS_SIZE = "onward.weights_size"
LABEL_RANGES = "onward.label_ranges"
INPUTS = "onward.inputs"  # of a step: a line for each input: role, offset in the state, bytes, type, shape
PROBLEMS = "onward.problems"  # the sentences that the output `problem` of a step counts
ROWS = "onward.rows"  # of the gradient step: tables of which it changes some rows, and the output that tells which
UPDATE = "onward.update"  # of the update step: its form and settings
