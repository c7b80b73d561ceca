"""Reinforcement learning: rewards, rollouts and updates."""
