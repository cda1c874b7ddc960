# bash completion for muster: subcommands, and each one's flags as its --help lists them.
_muster()
{
    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]}
    if [ "$COMP_CWORD" -eq 1 ]; then
        mapfile -t COMPREPLY < <(compgen -W "train eval run inspect diff verify names convert trace-merge bench plan version help" -- "$cur")
        return
    fi
    local command=("${COMP_WORDS[1]}")
    if [ "${COMP_WORDS[1]}" = bench ]; then
        if [ "$COMP_CWORD" -eq 2 ]; then
            mapfile -t COMPREPLY < <(compgen -W "$(muster bench --help | sed -n 's/^  \([a-z]*\) .*/\1/p')" -- "$cur")
            return
        fi
        command+=("${COMP_WORDS[2]}")
    fi
    case "$prev" in
    --model) mapfile -t COMPREPLY < <(compgen -W "resnet20 resnet32 resnet44 resnet56 resnet18 resnet34 resnet50 cnn mlp" -- "$cur"); return ;;
    --optimizer) mapfile -t COMPREPLY < <(compgen -W "sgd adam adamw" -- "$cur"); return ;;
    --to) mapfile -t COMPREPLY < <(compgen -W "torch legacy safetensors" -- "$cur"); return ;;
    --dtype) mapfile -t COMPREPLY < <(compgen -W "float32 float64 float16 bfloat16" -- "$cur"); return ;;
    --schedule) mapfile -t COMPREPLY < <(compgen -W "constant step cosine" -- "$cur"); return ;;
    esac
    if [[ $cur == -* ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$(muster "${command[@]}" --help 2>/dev/null | grep -o -- '--[a-z0-9-]*' | sort -u)" -- "$cur")
    else
        mapfile -t COMPREPLY < <(compgen -f -- "$cur")
    fi
}
complete -o filenames -F _muster muster
