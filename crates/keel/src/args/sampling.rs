//! Options for sampling.

use anyhow::{Context, Result, bail};
use clap::Args;
use evenkeel::recommended;
use keel_engine::{Sampler, SamplerOptions};
use keel_text::GenerationDefaults;

/// Sampling. Values that are not given are taken from the checkpoint's generation_config.json.
#[derive(Clone, Debug, Args)]
pub struct SamplingArgs {
    /// Most tokens to generate.
    #[arg(long, short = 'n', aliases = ["n-predict", "num-predict", "max-new-tokens"], value_name = "N", default_value_t = 256)]
    pub max_tokens: usize,
    /// Temperature, which divides the logits. 0 always takes the most probable token. By default as the model
    /// recommends (generation_config.json), else 0.
    #[arg(long, short = 't', alias = "temp", value_name = "T", allow_negative_numbers = true)]
    temperature: Option<f32>,
    /// Draw from the smallest set of most probable tokens that together have this probability. By default as the model
    /// recommends, else 1, which is all tokens.
    #[arg(long, value_name = "P")]
    top_p: Option<f32>,
    /// Draw from the K most probable tokens. 0 means all tokens. By default as the model recommends, else 0.
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// Leave out tokens whose probability is below P times that of the most probable token. By default as the model
    /// recommends, else 0, which is none.
    #[arg(long, value_name = "P")]
    min_p: Option<f32>,
    /// Seed of the random numbers. The same seed draws the same text. With a seed, the number of drafts follows from
    /// nominal costs, because measured costs differ from run to run. [default: 0, and measured costs]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Penalty on tokens that occurred before. 1 changes nothing. By default as the model recommends, else 1.
    #[arg(long, alias = "repeat-penalty", value_name = "X")]
    repetition_penalty: Option<f32>,
    /// Subtracted from the logits of tokens generated before.
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    presence_penalty: f32,
    /// Subtracted from a token's logit for each time that it was generated before.
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    frequency_penalty: f32,
    /// Add BIAS to the logit of token ID. May be repeated.
    #[arg(long, value_name = "ID=BIAS", value_parser = parse_bias, allow_hyphen_values = true)]
    logit_bias: Vec<(u32, f32)>,
    /// End the text before this string. May be repeated.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub stop: Vec<String>,
    /// Do not end at the model's end tokens.
    #[arg(long)]
    pub ignore_eos: bool,
}

fn parse_bias(text: &str) -> Result<(u32, f32)> {
    let Some((id, bias)) = text.split_once('=') else { bail!("expected ID=BIAS, for example 42=-5") };
    Ok((id.parse().context("the id is not a whole number")?, bias.parse().context("the bias is no number")?))
}

impl SamplingArgs {
    /// Whether the run must draw the same text when it is repeated.
    pub fn is_repeatable(&self) -> bool {
        self.seed.is_some()
    }

    /// The sampler's options. The checkpoint's recommendations apply where no option is given. A checkpoint that does
    /// not ask for sampling is decoded greedily.
    ///
    /// # Errors
    /// A value is out of range. This is checked before the model is loaded.
    pub fn options(&self, defaults: &GenerationDefaults) -> Result<SamplerOptions> {
        let own = recommended(defaults);
        let options = SamplerOptions {
            temperature: self.temperature.unwrap_or(own.temperature),
            top_k: self.top_k.unwrap_or(own.top_k),
            top_p: self.top_p.unwrap_or(own.top_p),
            min_p: self.min_p.unwrap_or(own.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(own.repetition_penalty),
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            logit_bias: self.logit_bias.clone(),
            seed: self.seed.unwrap_or_default(),
        };
        Sampler::new(options.clone(), &[])?;
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        sampling: SamplingArgs,
    }

    fn options(args: &[&str], defaults: &GenerationDefaults) -> SamplerOptions {
        let args = ["keel"].iter().chain(args);
        Cli::try_parse_from(args)
            .unwrap_or_else(|e| panic!("{e}"))
            .sampling
            .options(defaults)
            .expect("in range")
    }

    #[test]
    fn the_checkpoint_recommends_and_flags_win() {
        let mut defaults =
            GenerationDefaults { do_sample: Some(true), top_k: Some(40), ..GenerationDefaults::default() };
        let o = options(&["--top-p", "0.5"], &defaults);
        assert_eq!((o.temperature, o.top_k, o.top_p, o.min_p), (1.0, 40, 0.5, 0.0));
        defaults.temperature = Some(0.7);
        assert_eq!(options(&[], &defaults).temperature, 0.7);
        assert_eq!(options(&["--temperature", "0"], &defaults).temperature, 0.0);
        defaults.do_sample = None;
        assert_eq!(options(&[], &defaults), SamplerOptions::default());
    }

    /// The defaults in the help are those that hold without a recommendation.
    #[test]
    fn the_help_tells_the_defaults() {
        let command = <Cli as clap::CommandFactory>::command();
        let none = recommended(&GenerationDefaults::default());
        for (option, default) in [
            ("temperature", none.temperature.to_string()),
            ("top_p", none.top_p.to_string()),
            ("top_k", none.top_k.to_string()),
            ("min_p", none.min_p.to_string()),
            ("repetition_penalty", none.repetition_penalty.to_string()),
        ] {
            let arg = command.get_arguments().find(|arg| arg.get_id() == option).expect(option);
            let help = arg.get_help().expect(option).to_string();
            let (_, said) = help.split_once("By default as the model recommends").expect(option);
            assert!(said.contains(&format!("else {default}")), "{option}: {help}");
        }
    }

    #[test]
    fn a_stop_string_may_begin_with_a_dash() {
        let cli = Cli::try_parse_from(["keel", "--stop", "---", "--stop", "- "]).expect("two texts");
        assert_eq!(cli.sampling.stop, ["---", "- "]);
        let cold = Cli::try_parse_from(["keel", "-t", "-1"]).expect("a number");
        let error = cold.sampling.options(&GenerationDefaults::default()).expect_err("below 0").to_string();
        assert!(error.contains("temperature"), "{error}");
    }

    #[test]
    fn a_bias_names_a_token() {
        let o = options(&["--logit-bias", "7=-2.5", "--logit-bias", "8=1"], &GenerationDefaults::default());
        assert_eq!(o.logit_bias, [(7, -2.5), (8, 1.0)]);
        assert!(Cli::try_parse_from(["keel", "--logit-bias", "7"]).is_err());
    }
}
