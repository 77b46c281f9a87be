# preferences, by trl's script on eight GPUs
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 accelerate launch --config_file examples/accelerate_configs/deepspeed_zero2.yaml \
    --num_processes 8 trl/scripts/dpo.py \
    --dataset_name trl-lib/ultrafeedback_binarized \
    --model_name_or_path Qwen/Qwen2-0.5B-Instruct \
    --learning_rate 5.0e-7 \
    --num_train_epochs 1 \
    --per_device_train_batch_size 2 \
    --max_steps 1000 \
    --gradient_accumulation_steps 8 \
    --gradient_checkpointing \
    --beta 0.05 \
    --eval_strategy steps \
    --eval_steps 50 \
    --max_prompt_length 512 \
    --max_length 1024 \
    --optim adamw_torch_fused \
    --bf16 \
    --no_remove_unused_columns \
    --output_dir Qwen2-0.5B-DPO > dpo.log 2>&1
