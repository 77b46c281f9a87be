# the first command of trl's page, with a few more flags
export WANDB_PROJECT=capybara
trl sft --model_name_or_path Qwen/Qwen2.5-0.5B \
    --dataset_name trl-lib/Capybara \
    --output_dir Qwen2.5-0.5B-SFT \
    --max_length 2048 --packing \
    --eval_strategy epoch --save_strategy epoch \
    --report_to wandb \
    --push_to_hub
