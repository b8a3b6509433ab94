"""Flags, settings and commands of other tools, and vitrail's names for them, which errors suggest.

The tools are timm, ultralytics, transformers, lightly and torchvision's reference scripts.
"""

from collections.abc import Container

_FROM_BUNDLE = "The resolution is the bundle's."
_CLASSES = "The classes are those of the data or of the bundle."
_WEIGHTS = "`vitrail finetune` starts from weights; `vitrail weights` lists public ones."
_BATCH = "The batch size is chosen for the model."

# Vitrail's names of flags, positional arguments and settings, preferred first, and the names of other tools. A sentence
# is the advice for commands that have none of them.
_SYNONYMS: dict[tuple[str, ...], str] = {
    ("data", "images", "source"): (
        "data data_dir data_path data_root dataset dataset_name root train_dir train_data train_data_dir d folder"
    ),
    ("source", "images", "data"): "source src input input_dir inputs i image img images file files path",
    ("output", "destination"): (
        "o out out_dir output output_dir output_path save save_dir save_path project name run_name experiment logdir"
        " log_dir default_root_dir"
    ),
    ("model", "bundle", "source"): "model m model_name model_name_or_path model_path arch architecture a backbone",
    (
        "from",
        "bundle",
        "source",
        _WEIGHTS,
    ): "bundle weights pretrained pretrained_weights initial_checkpoint init_weights",
    ("bundle", "source", "resume"): "checkpoint checkpoint_path ckpt ckpt_path",
    ("resume",): "resume_from resume_from_checkpoint auto_resume continue",
    ("force",): "overwrite overwrite_output_dir exist_ok yes",
    ("resolution", _FROM_BUNDLE): (
        "resolution img_size imgsz image_size input_size crop_size train_crop_size img_resolution size res"
    ),
    ("classes", _CLASSES): "classes num_classes nb_classes n_classes num_labels nc",
    ("channels",): "in_chans input_channels num_channels",
    ("epochs",): "e num_epochs num_train_epochs max_epochs n_epochs total_epochs",
    ("steps",): "max_steps num_steps train_steps total_steps iterations iters max_iters",
    ("minutes", "budget"): "time max_time time_limit hours",
    ("batch", _BATCH): (
        "batch b bs batch_size train_batch_size per_device_train_batch_size per_device_eval_batch_size eval_batch_size"
    ),
    ("lr", "learning_rate"): "lr learning_rate lr0 base_lr max_lr blr",
    ("weight_decay",): "wd",
    ("optimiser",): "opt optim optimizer optimizer_name",
    ("betas",): "opt_betas adam_betas",
    ("schedule",): "sched scheduler lr_scheduler lr_scheduler_type lr_schedule cos_lr",
    ("warmup",): "warmup_epochs warmup_steps warmup_ratio lr_warmup_epochs",
    ("final",): "min_lr lrf",
    ("clip",): "clip_grad clip_grad_norm grad_clip max_grad_norm gradient_clip_val",
    ("accumulate",): "grad_accum_steps gradient_accumulation_steps accumulate_grad_batches update_freq",
    ("average",): "ema model_ema ema_decay model_ema_decay",
    ("label_smoothing",): "smoothing label_smoothing_factor",
    ("layer_decay",): "llrd lr_layer_decay layer_wise_decay",
    ("freeze",): "freeze_backbone linear_probe linear_probing freeze_encoder",
    ("activation_checkpointing",): "grad_checkpointing gradient_checkpointing",
    ("patience",): "early_stopping early_stopping_patience early_stop",
    ("holdout", "split"): "val_split validation_split train_val_split val_ratio val_fraction",
    ("split",): "subset phase",
    ("evaluate_every",): "eval_every eval_interval val_interval check_val_every_n_epoch",
    ("randaugment",): "aa auto_augment ra",
    ("erasing",): "reprob random_erase random_erasing",
    ("flip",): "hflip fliplr",
    ("mixup",): "mixup_alpha",
    ("cutmix",): "cutmix_alpha",
    ("workers", "threads", "jobs"): "j num_workers dataloader_num_workers n_jobs nw num_threads",
    ("device",): "gpu gpus cuda use_cpu no_cuda accelerator",
    ("precision",): "fp16 bf16 half dtype mixed_precision torch_dtype int8 quantize",
    ("compile",): "torchcompile torch_compile",
    ("checkpoint_seconds",): "save_steps save_period save_interval checkpoint_interval",
    ("keep",): "save_total_limit checkpoint_hist",
    ("seed",): "random_state manual_seed random_seed",
    ("top_k",): "k topk",
    ("threshold",): "conf confidence",
    ("to", "output"): "format",
    ("labels",): "class_map class_names id2label",
}


def _simplify_word(word: str) -> str:
    return word.lower().replace("_", "").replace("-", "")


_OUR_NAMES = {_simplify_word(theirs): ours for ours, synonyms in _SYNONYMS.items() for theirs in synonyms.split()}

_COMMANDS = {
    "train": "fit",
    "finetune": "fine-tune tune",
    "evaluate": "eval val validate test score",
    "predict": "infer inference classify embed",
    "inspect": "visualize attention",
    "bench": "benchmark",
    "doctor": "check",
    "convert": "download fetch",
    "models": "list",
    "info": "summary",
}
OTHER_COMMANDS = {theirs: ours for ours, synonyms in _COMMANDS.items() for theirs in synonyms.split()}
"""Vitrail's commands by the names of other tools."""


def our_names(theirs: str) -> tuple[str, ...]:
    """Return vitrail's names for a name of another tool, preferred first; the last may be a sentence."""
    return _OUR_NAMES.get(_simplify_word(theirs), ())


def suggest_our_name(theirs: str, ours: Container[str]) -> dict[str, str]:
    """Return `{theirs: our name}` for `did_you_mean`, with the preferred name among `ours`; empty if there is none."""
    name = next((name for name in our_names(theirs) if name in ours), None)
    return {} if name is None else {theirs: name}
