"""Which source hurts a fine-tuning? Scores of a Trainer's sources, while training and after, against real retraining.

    python -m benchmarks.trainer_sources run qnli --data-dir FOLDER --out results/sources
    python -m benchmarks.trainer_sources run made --out results/sources
    python -m benchmarks.trainer_sources table --out results/sources --page docs/huggingface.md

`qnli.py`: a small pre-trained BERT on rows of QNLI from four sources. `made.py`: a tiny BERT from random weights on
eight made sources, trained again without each. Every seed has other rows, another order and another start. What is
done is kept, one file a seed: a run that was stopped goes on.
"""
