//! The settings that `/set` changes.

use anyhow::{Context, Result, bail};
use keel_engine::{Sampler, SamplerOptions};

/// How answers are drawn.
#[derive(Clone, Debug)]
pub struct Settings {
    pub sampler: SamplerOptions,
    pub max_tokens: usize,
}

impl Settings {
    /// Changes a setting, given as `NAME VALUE`.
    ///
    /// # Errors
    /// There is no such setting, or the value is out of range. The settings are then unchanged.
    pub fn set(&mut self, text: &str) -> Result<()> {
        let (name, value) =
            text.split_once(|c: char| c.is_whitespace() || c == '=').context("expected NAME VALUE")?;
        let value = value.trim();
        let number = || value.parse::<f32>().with_context(|| format!("{value:?} is no number"));
        let whole = || value.parse::<u64>().with_context(|| format!("{value:?} is no whole number"));
        let mut changed = self.clone();
        let sampler = &mut changed.sampler;
        match name.replace('_', "-").as_str() {
            "temperature" | "temp" => sampler.temperature = number()?,
            "top-p" => sampler.top_p = number()?,
            "top-k" => sampler.top_k = whole()? as usize,
            "min-p" => sampler.min_p = number()?,
            "seed" => sampler.seed = whole()?,
            "repetition-penalty" => sampler.repetition_penalty = number()?,
            "max-tokens" => changed.max_tokens = whole()? as usize,
            other => bail!("there is no setting {other}; /set shows them"),
        }
        if changed.max_tokens == 0 {
            bail!("max-tokens is 0: it must be at least 1");
        }
        Sampler::new(changed.sampler.clone(), &[])?;
        *self = changed;
        Ok(())
    }

    /// All settings, one per line.
    pub fn show(&self) -> String {
        let s = &self.sampler;
        let line = |name: &str, value: String| format!("{name:<20}{value}\n");
        [
            line("temperature", s.temperature.to_string()),
            line("top-p", s.top_p.to_string()),
            line("top-k", s.top_k.to_string()),
            line("min-p", s.min_p.to_string()),
            line("seed", s.seed.to_string()),
            line("repetition-penalty", s.repetition_penalty.to_string()),
            line("max-tokens", self.max_tokens.to_string()),
        ]
        .concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_value_changes_nothing() {
        let mut settings = Settings { sampler: SamplerOptions::default(), max_tokens: 5 };
        settings.set("top_p 0.5").expect("a setting");
        settings.set("max-tokens=9").expect("a setting");
        assert_eq!((settings.sampler.top_p, settings.max_tokens), (0.5, 9));
        for wrong in ["top-p 2", "top-p", "sing 1", "max-tokens 0", "seed x", "temperature -1"] {
            assert!(settings.set(wrong).is_err(), "{wrong}");
        }
        assert_eq!((settings.sampler.top_p, settings.max_tokens), (0.5, 9));
        assert!(settings.show().contains("max-tokens          9"));
    }
}
