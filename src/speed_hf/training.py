# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""A Trainer that logs the loss of every exit, can train for a given time, and knows the optimizers of the field."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from huggingface_hub import ModelCard
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import Adafactor, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_pt_utils import nested_gather

from .modeling_speed_t5 import SpeedT5ForCausalLM


OPTIMIZERS = ("adamw", "muon", "adafactor_t5x")
EMBEDDING_BETA2 = 0.999
TIMED_SCHEDULES = ("cosine", "linear", "constant", "constant_with_warmup")


@dataclass
class SpeedTrainingArguments(TrainingArguments):
    """
    Arguments of [`SpeedTrainer`]: those of `TrainingArguments`, and

    Args:
        optimizer (`str`): `"adamw"`; `"muon"`, which is Muon for the layers' matrices and AdamW for the rest, both at
            the rates of AdamW (torch 2.9 or later); or `"adafactor_t5x"`, the Adafactor of T5X; with
            `lr_scheduler_type="inverse_sqrt"` and `learning_rate=1.0` its pretraining schedule,
            1 / sqrt(max(step, warmup_steps or 10,000)); with `"constant"` and 0.001 its fine-tuning.
        embedding_learning_rate (`float`, *optional*): peak rate of the embedding table under AdamW. It moves every
            number by about its rate, and the table starts with numbers of size 1 where the layers have 1 / 16 and
            less, so it wants some thirty times theirs. Adafactor scales its steps by itself.
        position_bias_learning_rate (`float`, *optional*): the same for the relative position table. A head that looks
            at the previous token needs a bias of about 5 there, which takes AdamW thousands of steps at the layers'
            rate; without such heads no model learns to copy or to align, so it wants fifteen times that rate too.
        max_train_minutes (`float`, *optional*): stop, and save, after this wall time. The learning rate then follows
            the elapsed share of the time, and `warmup_steps` must be a share below 1.
        compile_layers (`bool`): compile every unique layer by itself.
    """

    optimizer: str = field(default="adamw", metadata={"help": f"One of {', '.join(OPTIMIZERS)}."})
    embedding_learning_rate: float | None = field(
        default=None,
        metadata={"help": "Peak learning rate of the embedding table under AdamW; some 30 times the other."},
    )
    position_bias_learning_rate: float | None = field(
        default=None, metadata={"help": "Peak learning rate of the relative position table under AdamW."}
    )
    max_train_minutes: float | None = field(
        default=None,
        metadata={"help": "Stop and save after this wall time; the learning rate follows the elapsed share of it."},
    )
    compile_layers: bool = field(default=False, metadata={"help": "Compile every unique layer by itself."})

    def __post_init__(self):
        super().__post_init__()
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(
                f"`optimizer` must be one of {', '.join(OPTIMIZERS)}, got {self.optimizer!r}: choose one."
            )
        if self.optimizer == "muon" and not hasattr(torch.optim, "Muon"):
            raise ValueError(
                f"`optimizer` muon needs torch 2.9 or later, this is {torch.__version__}: update it, or choose adamw."
            )
        if self.label_smoothing_factor:
            raise ValueError(
                f"`label_smoothing_factor` must be 0, got {self.label_smoothing_factor}: the Trainer's smoothing "
                "would replace the loss over all exits, so leave it out."
            )
        if self.max_train_minutes is not None:
            self._check_time_budget()

    def _check_time_budget(self):
        if self.max_train_minutes <= 0:
            raise ValueError(
                f"`max_train_minutes` must be above 0, got {self.max_train_minutes}: leave it out for no limit."
            )
        if self.lr_scheduler_type not in TIMED_SCHEDULES:
            raise ValueError(
                f"`lr_scheduler_type` must be one of {', '.join(TIMED_SCHEDULES)} with `max_train_minutes`, got "
                f"{self.lr_scheduler_type.value!r}: choose one, or set `max_steps` instead."
            )
        shares = {"eval_steps": self.eval_steps, "save_steps": self.save_steps, "logging_steps": self.logging_steps}
        for name, value in shares.items():
            if value is not None and 0 < value < 1:
                raise ValueError(
                    f"`{name}` must be a number of steps with `max_train_minutes`, got {value}: set 1 or more."
                )
        if self.warmup_steps >= 1:
            raise ValueError(
                f"`warmup_steps` must be a share of the time, below 1, with `max_train_minutes`, got "
                f"{self.warmup_steps}: 0.02 is a usual value."
            )
        if self.max_steps <= 0:
            self.max_steps = 10**9  # time decides; the Trainer wants a number


class TimeBudget(TrainerCallback, ExportableState):
    """
    Stops training when its wall time is up, after a last evaluation and checkpoint. Time of earlier sessions counts.

    Args:
        minutes (`float`): wall time of the training, evaluations and checkpoints included.
    """

    def __init__(self, minutes: float):
        self.minutes = minutes
        self.seconds_before = 0.0  # of the sessions before this one
        self.seconds = 0.0  # of all sessions, as of the last optimizer step
        self.started_at: float | None = None

    @property
    def share(self) -> float:
        """The elapsed share of the budget, 0 to 1, the same on every process."""
        return min(1.0, self.seconds / (60 * self.minutes))

    def state(self) -> dict:
        return {"args": {"minutes": self.minutes}, "attributes": {"seconds": self.seconds}}

    def on_train_begin(self, args, state, control, **kwargs):
        saved = state.stateful_callbacks.get("TimeBudget", {})
        self.seconds = self.seconds_before = saved.get("attributes", {}).get("seconds", 0.0)
        self.started_at = time.monotonic()

    def on_optimizer_step(self, args, state, control, **kwargs):
        # Here, because the scheduler steps next. Rank 0's clock rules: ranks must stop at the same step.
        seconds = torch.tensor(self.seconds_before + time.monotonic() - self.started_at, device=args.device)
        if args.world_size > 1:
            torch.distributed.broadcast(seconds, src=0)
        self.seconds = seconds.item()

    def on_step_end(self, args, state, control, **kwargs):
        if self.share >= 1:
            control.should_training_stop = control.should_log = True
            control.should_evaluate = args.eval_strategy != "no"
            control.should_save = args.save_strategy != "no"


def timed_rate(share: float, warmup: float, schedule: str) -> float:
    """
    Factor of the learning rate.

    Args:
        share (`float`): elapsed share of the time, 0 to 1.
        warmup (`float`): share of the time in which the factor rises from 0 to 1.
        schedule (`str`): one of `TIMED_SCHEDULES`; what follows the warm-up.

    Returns:
        `float` between 0 and 1.
    """
    if share < warmup:
        return share / warmup
    decayed = (share - warmup) / (1 - warmup)
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * decayed))
    return 1 - decayed if schedule == "linear" else 1.0


class TwoOptimizers(Optimizer):
    """
    Two optimizers of different parameters as one, for schedulers and checkpoints.

    Args:
        first, second (`Optimizer`): what steps. Their parameter groups, first's first, are the groups of this one.
    """

    def __init__(self, first: Optimizer, second: Optimizer):
        self.optimizers = (first, second)
        super().__init__(first.param_groups + second.param_groups, {})

    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def state_dict(self):
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict):
        for optimizer, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        # They made new groups; schedulers write to ours.
        self.param_groups[:] = [group for optimizer in self.optimizers for group in optimizer.param_groups]


def build_optimizer(model: SpeedT5ForCausalLM, args: SpeedTrainingArguments) -> Optimizer:
    """
    The optimizer that `args.optimizer` names.

    Args:
        model ([`SpeedT5ForCausalLM`]): what is trained.
        args ([`SpeedTrainingArguments`]): names and numbers.

    Returns:
        `torch.optim.Optimizer`
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if args.optimizer != "adafactor_t5x":
        table = model.get_input_embeddings().weight
        bias = model.model.relative_attention_bias.weight
        groups: list[dict] = [
            {
                "params": [p for p in parameters if p is table],
                "lr": args.embedding_learning_rate or args.learning_rate,
                # The row of a rare token has a large gradient seldom, and a small one from the head at every step. A
                # short memory forgets the large ones and turns the small ones into full steps of noise.
                "betas": (args.adam_beta1, EMBEDDING_BETA2),
            },
            {
                "params": [p for p in parameters if p is bias],
                "lr": args.position_bias_learning_rate or args.learning_rate,
                "weight_decay": 0.0,
            },
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ]
        matrices = [p for p in parameters if p.ndim > 1 and p is not table and p is not bias]
        if args.optimizer == "adamw":
            groups.append({"params": matrices})
        adamw = AdamW(
            [group for group in groups if group["params"]],
            lr=args.learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            weight_decay=args.weight_decay,
        )
        if args.optimizer == "adamw":
            return adamw
        # The adjustment makes steps as long as AdamW's, so that its learning rates serve here too.
        muon = torch.optim.Muon(
            matrices, lr=args.learning_rate, weight_decay=args.weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        return TwoOptimizers(muon, adamw)
    return Adafactor(
        parameters,
        lr=args.learning_rate,
        scale_parameter=True,  # the Trainer's own "adafactor" turns this off, which is not T5X's optimizer
        relative_step=False,
        warmup_init=False,
        clip_threshold=1.0,
        decay_rate=-0.8,
        eps=(1e-30, 1e-3),
        beta1=None,
        weight_decay=args.weight_decay,
    )


class SpeedTrainer(Trainer):
    """
    `Trainer` for models with exits.

    Logs `loss_exit_1` .. `loss_exit_G` beside `loss`, and the same for evaluations, where every loss is the mean over
    all target tokens. Exact under gradient accumulation and on several processes; there, an evaluation counts the rows
    twice with which the Trainer fills up the last batch.

    Args:
        model ([`SpeedT5ForCausalLM`]).
        args ([`SpeedTrainingArguments`]).
        text_metrics (`Callable[[PreTrainedModel], dict[str, float]]`, *optional*): called in every evaluation on the
            model in eval mode; what it returns joins the metrics, so `metric_for_best_model` can name it.
        kwargs: as for `Trainer`.

    Attributes:
        model_card (`ModelCard`, *optional*): what `create_model_card` writes, and `push_to_hub` pushes, as the README.
    """

    def __init__(self, model, args: SpeedTrainingArguments, text_metrics: Callable | None = None, **kwargs):
        if not isinstance(args, SpeedTrainingArguments):
            raise TypeError(
                f"`args` must be SpeedTrainingArguments, got {type(args).__name__}: they take the same names."
            )
        super().__init__(model, args, **kwargs)
        self.text_metrics = text_metrics
        self.model_card: ModelCard | None = None
        self.time_budget: TimeBudget | None = None
        if args.max_train_minutes is not None:
            self.time_budget = TimeBudget(args.max_train_minutes)
            self.add_callback(self.time_budget)
        if args.compile_layers:
            for layer in model.model.layers:
                layer.compile()
        self._train_losses = _ExitLosses()
        self._eval_losses = _ExitLosses()

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            self.optimizer = build_optimizer(self.model if model is None else model, self.args)
        return super().create_optimizer(model)

    def create_scheduler(self, num_training_steps, optimizer=None):
        args, optimizer = self.args, optimizer or self.optimizer
        rate = None
        if self.time_budget is not None:
            rate = lambda step: timed_rate(self.time_budget.share, args.warmup_steps, args.lr_scheduler_type)  # noqa: E731
        elif args.optimizer == "adafactor_t5x" and args.lr_scheduler_type == "inverse_sqrt":
            rate = lambda step: max(step + 1, args.warmup_steps or 10_000) ** -0.5  # noqa: E731
        if self.lr_scheduler is None and rate is not None:
            self.lr_scheduler = LambdaLR(optimizer, rate)
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if not model.training and self.compute_metrics is None:
            inputs = {**inputs, "logits_to_keep": 1}  # nobody reads the logits
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        # Under DataParallel the devices' losses lie end to end.
        exit_losses = outputs["exit_losses"].detach().float().view(-1, self.model.config.num_repetitions).mean(0)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            exit_losses = exit_losses * self.accelerator.num_processes  # as the Trainer does to `loss`
        if model.training:
            self._train_losses.add(exit_losses, weight=float(self.accelerator.sync_gradients))
        else:
            num_items = num_items_in_batch or inputs["labels"][:, 1:].ne(-100).sum()
            losses = torch.cat([loss.detach().float().mean().view(1), exit_losses])
            self._eval_losses.add(losses * num_items, weight=float(num_items))
        return (loss, outputs) if return_outputs else loss

    def log(self, logs, start_time=None):
        if "loss" in logs and self._train_losses.weight:
            means = self._train_losses.pop_means(self.args.parallel_mode)
            logs.update({f"loss_exit_{exit_}": mean for exit_, mean in enumerate(means, start=1)})
        super().log(logs, start_time)

    def evaluation_loop(self, dataloader, description, *args, metric_key_prefix="eval", **kwargs):
        self._eval_losses = _ExitLosses()
        kwargs["metric_key_prefix"] = metric_key_prefix
        output = super().evaluation_loop(dataloader, description, *args, **kwargs)
        if self._eval_losses.weight:
            loss, *exits = self._eval_losses.pop_means(self.args.parallel_mode)
            output.metrics[f"{metric_key_prefix}_loss"] = loss  # the Trainer's is a mean of batch means
            for exit_, mean in enumerate(exits, start=1):
                output.metrics[f"{metric_key_prefix}_loss_exit_{exit_}"] = mean
        if self.text_metrics is not None:
            # Prompts have many lengths: compiled layers would compile again for each.
            with torch.compiler.set_stance("force_eager"):
                metrics = self.text_metrics(self.model)
            output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in metrics.items()})
        return output

    def create_model_card(self, *args, **kwargs):
        if self.model_card is None:
            super().create_model_card(*args, **kwargs)
        elif self.is_world_process_zero():
            self.model_card.save(f"{self.args.output_dir}/README.md")


class _ExitLosses:
    """Weighted mean of loss vectors over batches and processes."""

    def __init__(self):
        self.total, self.weight = 0.0, 0.0

    def add(self, losses: torch.Tensor, weight: float):
        self.total, self.weight = self.total + losses, self.weight + weight

    def pop_means(self, parallel_mode) -> list[float]:
        # float64: token counts of a long evaluation pass float32's integers.
        both = torch.cat([self.total, self.total.new_tensor([self.weight])]).double()
        both = nested_gather(both[None], parallel_mode).mean(0)
        self.__init__()
        return (both[:-1] / both[-1]).tolist()


__all__ = ["SpeedTrainer", "SpeedTrainingArguments", "TimeBudget", "timed_rate"]
