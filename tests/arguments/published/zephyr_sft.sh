ACCELERATE_LOG_LEVEL=info accelerate launch --config_file recipes/zero3.yaml scripts/run_sft.py zephyr_sft.yaml --num_train_epochs=1 --load_in_4bit=false
